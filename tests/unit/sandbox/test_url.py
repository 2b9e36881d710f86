"""Programs run on a server with SandboxFusion's API; a server that fails is no verdict."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.sandbox.base import Ending, Program, SandboxError
from rlctl.sandbox.probe import probe
from rlctl.sandbox.url import UrlSandbox
from tests.unit.sandbox.fusion_server import fusion_server
from tests.unit.sandbox.kinds import SMALL


def test_programs_run_on_the_server() -> None:
    with fusion_server() as url:
        sandbox = UrlSandbox(url)
        program = Program(
            source="print(input(), open('a/b').read()); open('c', 'w').write('out')",
            stdin=b"in\n",
            files={"a/b": b"file"},
            outputs=("c", "none"),
        )
        result = sandbox.run(program, SMALL)
        assert result.has_passed and result.stdout == b"in file\n"
        assert (result.files, result.missing) == ({"c": b"out"}, {"none": "not returned by the server"})
        command = Program(argv=("sh", "-c", 'echo "$X"; exit 3'), variables={"X": "a b"})
        result = sandbox.run(command, SMALL)
        assert (result.ending, result.exit_code, result.stdout) == (Ending.EXITED, 3, b"a b\n")
        result = sandbox.run(Program(source="while True: pass"), replace(SMALL, wall_s=0.3))
        assert result.ending is Ending.WALL_TIME
        result = sandbox.run(Program(source="import os; os.kill(os.getpid(), 11)"), SMALL)
        assert (result.ending, result.exit_code) == (Ending.SIGNAL, 139)
        result = sandbox.run(Program(source="print('x' * 100_000)"), SMALL)
        assert (result.ending, result.is_cut, len(result.stdout)) == (Ending.OUTPUT, True, SMALL.output_bytes)
        assert probe(sandbox).describe() == "network, files, processes, memory, forks elsewhere"


def test_a_server_that_fails_is_no_verdict(tmp_path: Path) -> None:
    with fusion_server() as url:
        with pytest.raises(SandboxError, match="no free pod"):
            UrlSandbox(url).run(Program(source="fail"), SMALL)
        with pytest.raises(SandboxError, match="404"):
            UrlSandbox(f"{url}/elsewhere").run(Program(source=""), SMALL)
        with pytest.raises(ValueError, match="keeps no working folder"):
            UrlSandbox(url).run(Program(source="", folder=tmp_path), SMALL)
    with pytest.raises(SandboxError, match="refused"):
        UrlSandbox(url).run(Program(source=""), SMALL)
