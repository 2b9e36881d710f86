"""A program runs with its files, and ends at each of its limits; nothing is left behind."""

import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlctl.config.sandbox_schema import SandboxName
from rlctl.sandbox.base import Ending, Limits, Program, SandboxError
from tests.unit.sandbox.kinds import LOCAL_KINDS, SMALL, local_sandbox, run_source

# Ends at a limit, or by itself if the kernel refuses with an error -> program.
LIMITED = {
    "a loop": ({Ending.CPU_TIME}, "while True: pass"),
    "sleep": ({Ending.WALL_TIME}, "import time; time.sleep(60)"),
    "output": ({Ending.OUTPUT}, "while True: print('x' * 1000)"),
    "one allocation": ({Ending.EXITED}, "x = bytearray(8 << 30)"),
    "eight processes that allocate": (
        {Ending.MEMORY},
        "import os, time\nfor i in range(8):\n if not os.fork(): x = bytearray(100 << 20); break\ntime.sleep(9)",
    ),
    "one file": ({Ending.FILES}, "f = open('f', 'wb')\nwhile True: f.write(b'x' * 1000000)"),
    "many files": ({Ending.FILES}, "for i in range(9): open(str(i), 'wb').write(b'x' * 4000000)"),
    "a signal": ({Ending.SIGNAL}, "import os; os.kill(os.getpid(), 11)"),
    "an exit code": ({Ending.EXITED}, "raise SystemExit(3)"),
    "processes": (
        {Ending.EXITED, Ending.PROCESSES},
        "import os, time\nfor i in range(60):\n if not os.fork(): time.sleep(9); break",
    ),
}
LIMITS = {"sleep": Limits(wall_s=0.5, cpu_s=2.0), "a loop": Limits(wall_s=60.0, cpu_s=0.5)}


@pytest.mark.parametrize("kind", LOCAL_KINDS)
def test_a_program_reads_its_files_and_writes_the_ones_asked_for(kind: SandboxName) -> None:
    source = "print(input(), open('a/b').read()); open('c', 'w').write('out'); import numpy; exit(0)"
    program = Program(
        source=source, stdin=b"in\n", files={"a/b": b"file"}, outputs=("c", "none", "a"), variables={"X": "1"}
    )
    result = local_sandbox(kind).run(program, Limits())
    assert result.has_passed, result
    assert (result.stdout, result.stderr, result.is_cut) == (b"in file\n", b"", False)
    assert result.files == {"c": b"out"}
    assert list(result.missing) == ["none", "a"]
    assert 0 < result.cpu_s < result.wall_s + 1


@pytest.mark.parametrize("kind", LOCAL_KINDS)
@pytest.mark.parametrize("case", LIMITED)
def test_a_program_ends_at_its_limit(kind: SandboxName, case: str) -> None:
    endings, source = LIMITED[case]
    result = run_source(kind, source, LIMITS.get(case, SMALL))
    assert result.ending in endings, result
    assert not result.has_passed or case == "processes"
    assert len(result.stdout) <= SMALL.output_bytes


@pytest.mark.parametrize("kind", LOCAL_KINDS)
def test_orphans_end_with_their_program(kind: SandboxName) -> None:
    name = f"orphan-{os.getpid()}-{kind}"
    source = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sh", ["sh", "-c", "sleep 60; : {name}"])
    os._exit(0)
print("started")
"""
    assert run_source(kind, source).stdout == b"started\n"
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if any(name in word for word in command)] == []


@pytest.mark.parametrize("kind", LOCAL_KINDS)
def test_a_kept_folder_goes_from_one_program_to_the_next(kind: SandboxName, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    tmp_path.chmod(0o711)
    for parent in tmp_path.parents[:-2]:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o011)
    sandbox = local_sandbox(kind)
    sandbox.run(Program(source="open('state', 'a').write('x')", folder=folder), SMALL)
    sandbox.run(Program(argv=("sh", "-c", "printf y >> state; ln -s /etc/passwd link"), folder=folder), SMALL)
    assert (folder / "state").read_bytes() == b"xy"
    # A link that a program left is replaced, and never followed.
    program = Program(source="print(open('link').read())", files={"link": b"plain"}, folder=folder, outputs=("link",))
    result = sandbox.run(program, SMALL)
    assert (result.stdout, result.files) == (b"plain\n", {"link": b"plain"})


@pytest.mark.parametrize("kind", LOCAL_KINDS)
def test_threads_run_programs_at_the_same_time(kind: SandboxName) -> None:
    sandbox = local_sandbox(kind)
    outputs = list[bytes]()

    def run(number: int) -> None:
        outputs.append(sandbox.run(Program(source=f"import time; time.sleep(0.3); print({number})"), SMALL).stdout)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outputs) == [b"0\n", b"1\n", b"2\n", b"3\n"]


def test_a_program_that_no_sandbox_can_run_is_refused_with_the_choices() -> None:
    sandbox = local_sandbox("process")
    with pytest.raises(ValueError, match="language 'cobol' is none of python, bash, sh"):
        sandbox.run(Program(source="", language="cobol"), SMALL)
    for name in ("/etc/x", "../x", "a/../../x", ""):
        with pytest.raises(ValueError, match="inside the working folder"):
            sandbox.run(Program(source="", files={name: b""}), SMALL)


def test_a_command_that_is_missing_ends_with_127_or_is_no_verdict() -> None:
    with pytest.raises(SandboxError, match="no-such-program"):
        local_sandbox("process").run(Program(argv=("no-such-program",)), SMALL)


def test_a_result_near_its_limit_says_so() -> None:
    start = time.monotonic()
    result = run_source("process", "import time\nwhile time.process_time() < 0.45: pass", Limits(cpu_s=0.55))
    assert result.has_passed and result.is_near(Limits(cpu_s=0.55)), (result, time.monotonic() - start)
    assert not result.is_near(Limits(cpu_s=60.0, wall_s=600.0))
