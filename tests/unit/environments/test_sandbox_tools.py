"""Tools in the sandbox keep variables and files within an episode, and end at the run's limits."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import psutil
import pytest

from rlctl.config.sandbox_schema import SandboxName, SandboxSection
from rlctl.config.schema import GrpoConfig
from rlctl.environments import sandbox_tools
from rlctl.environments.contract import read_contract
from rlctl.environments.sandbox_tools import PythonShellTools
from rlctl.preflight.load import load
from tests.unit.sandbox.kinds import LOCAL_KINDS, local_sandbox


@pytest.fixture(params=LOCAL_KINDS)
def tools(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PythonShellTools]:
    kind: SandboxName = request.param
    local_sandbox(kind)
    config = load("grpo", "grpo-tiny", [f"sandbox={kind}", "sandbox.cpu_s=0.5", "sandbox.output_kib=1"]).config
    assert isinstance(config, GrpoConfig)
    monkeypatch.setenv("RLCTL_SANDBOX", json.dumps(asdict(config.sandbox)))
    sandbox_tools._open_once.cache_clear()
    episode = PythonShellTools()
    episode.reset(files={"a/b.txt": "text"})
    yield episode
    episode.close()
    sandbox_tools._open_once.cache_clear()


def test_variables_and_files_stay_within_an_episode(tools: PythonShellTools) -> None:
    assert tools.python("x = 3\nx + 1") == "4\n"
    assert tools.python("print(x); x * 2") == "3\n6\n"
    assert "ZeroDivisionError" in tools.python("1 / 0")
    assert "SyntaxError" in tools.python("def")
    # A child that went on would print into a later answer.
    assert tools.python("import os\nif os.fork() == 0: os._exit(0)\nprint('parent', end='')") == "parent"
    assert tools.python("print(open('a/b.txt').read()); open('c', 'w').write('new')") == "text\n3\n"
    assert tools.shell("cat a/b.txt c; echo late >> c; exit 2") == "textnew\nexit code 2"
    assert tools.python("open('c').read()") == "'newlate\\n'\n"
    assert tools.python("raise SystemExit('over')") == "SystemExit: over\n"
    assert tools.python("x") == "3\n"


def test_a_limit_ends_the_interpreter_and_the_model_reads_which(tools: PythonShellTools) -> None:
    tools.python("x = 1; open('kept', 'w').close()")
    ending = "The interpreter was ended at its limit on cpu time. Its variables are lost."
    assert tools.python("while True: pass") == ending
    assert "NameError" in tools.python("x")
    assert tools.shell("ls") == "a\nkept"
    assert tools.python("print('y' * 5000)") == f"{'y' * 1024}\n[the rest of the output was cut]"
    assert "limit on cpu time" in tools.shell("while true; do :; done")
    answer = tools.python("import os\nfor fd in range(3, 30):\n  try: os.write(fd, b'x\\n')\n  except OSError: 0")
    assert answer == "The interpreter was ended: the code broke its connection. Its variables are lost."
    assert tools.python("'again'") == "'again'\n"


def test_nothing_runs_between_calls_or_after_the_episode(tools: PythonShellTools) -> None:
    before = psutil.Process(os.getpid()).children(recursive=True)
    tools.python("import threading, time\ncount = 0\ndef work():\n  global count\n  while True: count += 1")
    tools.python("threading.Thread(target=work, daemon=True).start()")
    first = int(tools.python("count"))
    children = [child for child in psutil.Process(os.getpid()).children(recursive=True) if child not in before]
    deadline = time.monotonic() + 5
    while any(child.status() == psutil.STATUS_RUNNING for child in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    times = [child.cpu_times() for child in children]
    time.sleep(0.2)
    assert children and [child.cpu_times() for child in children] == times
    assert int(tools.python("count")) >= first
    tools.close()
    tools.reset()
    assert [child for child in children if child.is_running()] == []


def test_the_tools_keep_the_contract() -> None:
    contract = read_contract(PythonShellTools, {})
    assert contract.problems == [] and not contract.has_reward
    assert [tool["function"]["name"] for tool in contract.tools] == ["python", "shell"]


def test_a_sandbox_that_fails_ends_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("grpo", "grpo-tiny", []).config
    assert isinstance(config, GrpoConfig)
    section: SandboxSection = replace(config.sandbox, name="command", command="sh -c 'exit 125'")
    monkeypatch.setenv("RLCTL_SANDBOX", json.dumps(asdict(section)))
    sandbox_tools._open_once.cache_clear()
    episode = PythonShellTools()
    episode.reset()
    with pytest.raises(SystemExit, match="the sandbox failed: command: the program was not run"):
        episode.shell("true")
    episode.close()
    sandbox_tools._open_once.cache_clear()
