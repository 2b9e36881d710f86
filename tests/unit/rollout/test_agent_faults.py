"""An agent that fails in its process fails only its episode. Other agents in the process go on (contract 11)."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlctl.data.tasks import Task
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.outcomes import AgentSpec, EnvironmentSpec
from rlctl.environments.plain_chat import PlainChat
from rlctl.rollout.players.agent import AgentPlayer
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import Rollout
from tests.unit.rollout.test_player import LIMITS, ScriptedEngines, begin, start
from tests.waiting import PATIENCE_S, until

# Deadline of an agent: several times the start of a command on a busy machine, so that only a hanging agent reaches it.
DEADLINE_S = 4.0
# An agent that asks for a turn without an SDK, whose import would take longer than the rest of the test.
ASK = """
import json, os, signal, socket, subprocess, sys, threading, time
from urllib.request import Request, urlopen


def ask(url, key, text="go"):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    return urlopen(Request(url + "/chat/completions", body, {"Authorization": f"Bearer {key}"})).read()
"""
FUNCTIONS = """

def run(task, url, key):
    return globals()[task.row["agent"]](task, url, key)


def well(task, url, key):
    ask(url, key)
    return 1


def hangs(task, url, key):
    ask(url, key)
    while True:
        time.sleep(0.01)


def hangs_until_it_is_refused(task, url, key):
    while True:
        time.sleep(0.05)
        urlopen(Request(url + "/models", headers={"Authorization": f"Bearer {key}"})).read()


def leaves(task, url, key):
    ask(url, key)
    os._exit(7)


def forks(task, url, key):
    if os.fork() == 0:
        time.sleep(300)
        os._exit(0)
    ask(url, key)
    return 1


def floods(task, url, key):
    for _ in range(200):
        print("x" * 100_000)
    ask(url, key)
    return 1


def closes_the_listener(task, url, key):
    ask(url, key)
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if socket.socket(fileno=os.dup(number)).getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                os.close(number)
        except OSError:
            continue
    return 1


def gives_up(task, url, key):
    try:
        urlopen(Request("http://127.0.0.1:1"))
    except OSError as error:
        raise RuntimeError("Connection error.") from error
"""
COMMAND = """
task = json.loads(os.environ["RLCTL_TASK"])
turn = lambda: ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
pid_file = task["row"]["pid_file"]
exec(task["row"]["agent"])
"""
# A child in its own session and with its own children. Its environment has no mark of the command.
LEFT = """
child = [sys.executable, "-c", "import os,subprocess,sys,time; subprocess.Popen(['sleep','300'],start_new_session=True)"
    ";open(sys.argv[1],'w').write(str(os.getpid()));time.sleep(300)", pid_file]
subprocess.Popen(child, start_new_session=True, env={})
while not (os.path.exists(pid_file) and open(pid_file).read()):
    time.sleep(0.01)
turn()
print(1)
"""
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(pid_file, "w").write(str(os.getpid()))
turn()
time.sleep(300)
"""


class AgentStage:
    """Rollouts of one pool, with one process, and with scripted engines."""

    def __init__(self, pool: EnvironmentPool, logs: Path, max_agents: int | None = None) -> None:
        self.pool = pool
        self.logs = logs
        # Bytes in place of tokens: no process loads a tokenizer.
        chat: Any = PlainChat()
        engines = ScriptedEngines(chat, lambda request: [55], events=pool.events)
        # No second try, so that each failure is seen.
        player = AgentPlayer(pool, chat, replace(LIMITS, max_retries=0), True, 1000, max_agents)
        self.runner = RolloutRunner(player, engines)

    def begin(self, *agents: str, pid_file: str = "") -> list[Rollout]:
        """Begin a rollout of each agent, side by side; return a list that gets the rollouts as they end."""
        tasks = [Task("r0", [0], "play", None, {"agent": agent, "pid_file": pid_file}) for agent in agents]
        return begin(self.runner, *(replace(start(index), task=task) for index, task in enumerate(tasks)))

    def play(self, *agents: str, pid_file: str = "") -> list[Rollout]:
        """Return the rollouts of these agents in order, once the process holds none."""
        ended = self.begin(*agents, pid_file=pid_file)
        self.wait_until_ended(ended, len(agents))
        until(lambda: not any(process.episodes for process in self.pool._processes))
        return sorted(ended, key=lambda rollout: rollout.id.index)

    def wait_until_ended(self, ended: list[Rollout], count: int) -> None:
        """Wait until a list has `count` rollouts. Raises the defects of their players."""

        def has_ended() -> bool:
            self.runner.check()
            return len(ended) == count

        until(has_ended)

    def find_process(self) -> psutil.Process:
        """Return the process that runs the agents."""
        return psutil.Process(self.pool.pids()[-1]).children()[0].children()[0]


@pytest.fixture(scope="module")
def functions(tmp_path_factory: Any) -> Iterator[AgentStage]:
    folder: Path = tmp_path_factory.mktemp("functions")
    (folder / "agents.py").write_text(ASK + FUNCTIONS)
    with ExitStack() as stack:
        yield make_stage(stack, folder, f"{folder}/agents.py:run", (), DEADLINE_S)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: Any) -> Iterator[AgentStage]:
    with ExitStack() as stack:
        yield make_command_stage(stack, tmp_path_factory.mktemp("commands"), PATIENCE_S)


def make_command_stage(stack: ExitStack, folder: Path, deadline_s: float) -> AgentStage:
    (folder / "command.py").write_text(ASK + COMMAND)
    return make_stage(stack, folder, "command", (sys.executable, "-S", f"{folder}/command.py"), deadline_s)


def make_stage(stack: ExitStack, logs: Path, name: str, command: tuple[str, ...], deadline_s: float) -> AgentStage:
    spec = EnvironmentSpec(name, deadline_s, agent=AgentSpec(command))
    pool = stack.enter_context(EnvironmentPool({"agent": spec}, 2048, 1, logs))
    pool.contracts()
    return AgentStage(pool, logs)


def check_failure(rollout: Rollout) -> str:
    """Return why a rollout failed, after a look at its rows."""
    assert rollout.episode and rollout.reward is None
    assert (rollout.episode.failure is None) == bool(rollout.rows)
    return str(rollout.episode.failure)


def is_well(rollout: Rollout) -> bool:
    return rollout.episode is not None and rollout.episode.reward == 1 and len(rollout.rows) == 1


def test_a_function_that_hangs_costs_its_episode_and_later_its_process(functions: AgentStage) -> None:
    before = functions.find_process()
    hung, well = functions.play("hangs", "well")
    assert "resume took longer than 4 s" in check_failure(hung) and is_well(well)
    # The thread went on after its session. Only the end of the process ended it.
    until(lambda: not before.is_running())
    assert is_well(functions.play("well")[0])


def test_a_function_that_ends_with_its_session_costs_no_process(functions: AgentStage) -> None:
    assert is_well(functions.play("well")[0])
    before = functions.find_process()
    hung, _ = functions.play("hangs_until_it_is_refused", "well")
    assert "took longer than 4 s" in check_failure(hung)
    assert is_well(functions.play("well")[0]) and functions.find_process() == before


def test_a_function_that_exits_takes_its_process_along_and_gives_no_value(functions: AgentStage) -> None:
    (exited,) = functions.play("leaves")
    assert "its process ended: exit code 7" in check_failure(exited)
    assert is_well(functions.play("well")[0])


@pytest.mark.parametrize("agent", ["forks", "floods"])
def test_a_function_that_forks_or_floods_is_played(functions: AgentStage, agent: str) -> None:
    assert all(is_well(rollout) for rollout in functions.play(agent, "well"))


def test_a_client_that_gives_up_is_a_failure(functions: AgentStage) -> None:
    assert "RuntimeError" in check_failure(functions.play("gives_up")[0])


def test_a_process_whose_listener_is_closed_is_replaced(functions: AgentStage) -> None:
    damaged = functions.find_process()
    assert is_well(functions.play("closes_the_listener")[0])
    assert check_failure(functions.play("well")[0]) == "the endpoint of its process was closed by code of the process"
    assert is_well(functions.play("well")[0]) and functions.find_process() != damaged


def test_a_killed_process_costs_its_episodes_alone(functions: AgentStage) -> None:
    assert is_well(functions.play("well")[0])
    before = functions.find_process()
    ended = functions.begin("hangs")
    before.kill()
    until(lambda: len(ended) == 1)
    assert "its process ended: SIGKILL" in check_failure(ended[0])
    assert is_well(functions.play("well")[0])


def test_a_command_that_hangs_is_ended_and_its_process_serves_on(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with ExitStack() as stack:
        hurried = make_command_stage(stack, tmp_path, DEADLINE_S)
        before = hurried.find_process()
        hung, well = hurried.play(STUBBORN, "turn(); print(1)", pid_file=str(pid_file))
        assert "took longer than 4 s" in check_failure(hung) and is_well(well)
        pid = int(pid_file.read_text())
        until(lambda: not psutil.pid_exists(pid))
        assert is_well(hurried.play("turn(); print(1)")[0]) and hurried.find_process() == before


SECOND = """
alive = [pid for pid in open(pid_file).read().split() if os.path.exists("/proc/" + pid)]
turn()
print(0.5 if alive else 1)
"""


# Two supervisors are between a command and its process.
KILL_PROCESS = """
above = os.getpid()
for _ in range(3):
    above = int(open(f"/proc/{above}/stat").read().rpartition(")")[2].split()[1])
os.kill(above, 9)
"""


@pytest.mark.parametrize("blow", ["", KILL_PROCESS], ids=["stopped", "its process killed"])
def test_another_command_waits_until_nothing_of_a_stopped_one_runs(
    commands: AgentStage, tmp_path: Path, blow: str
) -> None:
    """A stubborn command goes on for two seconds. Where its process is killed, a supervisor ends it."""
    pid_file = tmp_path / "pid"
    bounded = AgentStage(commands.pool, commands.logs, max_agents=1)
    ended = bounded.begin(STUBBORN.replace("turn()", f"turn()\n{blow}"), SECOND, pid_file=str(pid_file))
    until(lambda: pid_file.exists() and pid_file.read_text())
    if not blow:
        (first,) = bounded.runner.events.run(bounded.runner.stop([start(0).id]))
        assert first == start(0).id
    bounded.wait_until_ended(ended, 2 if blow else 1)
    assert is_well(max(ended, key=lambda rollout: rollout.id.index)), "it began while the first one ran"
    bounded.runner.close()


@pytest.mark.parametrize(
    "blow", ["", "os.kill(os.getppid(), 9); time.sleep(300)"], ids=["ends", "kills its supervisor"]
)
def test_nothing_outlives_a_command(commands: AgentStage, tmp_path: Path, blow: str) -> None:
    pid_file = tmp_path / "pid"
    (rollout,) = commands.play(LEFT.replace("print(1)", blow or "print(1)"), pid_file=str(pid_file))
    if blow:
        assert f"{Path(sys.executable).name} was ended by signal 9" in check_failure(rollout)
    else:
        assert is_well(rollout)
    pid = int(pid_file.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    family = psutil.Process(commands.pool.pids()[-1])
    until(lambda: "sleep" not in [process.name() for process in family.children(recursive=True)])


FLOOD = """
turn()
for _ in range(3000):
    sys.{stream}.write("y\\n" * 2000)
print()
print(1)
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_of_output_is_cut_and_costs_little(commands: AgentStage, stream: str) -> None:
    spent = sum(commands.find_process().cpu_times()[:2])
    assert is_well(commands.play(FLOOD.format(stream=stream))[0])
    spent = sum(commands.find_process().cpu_times()[:2]) - spent
    assert spent < 1.5, "12 MB of short lines"
    until(lambda: b"printed more than 1 MiB" in (commands.logs / "environments.log").read_bytes())


def test_a_row_that_is_too_long_for_a_command_says_so(commands: AgentStage) -> None:
    assert "RLCTL_TASK has" in check_failure(commands.play("turn()" + " " * (1 << 18))[0])


def test_a_command_that_is_no_program_says_so(tmp_path: Path) -> None:
    with ExitStack() as stack:
        absent = make_stage(stack, tmp_path, "command", ("nowhere", "x"), PATIENCE_S)
        assert check_failure(absent.play("")[0]) == (
            "nowhere cannot be started: [Errno 2] No such file or directory: 'nowhere'"
        )


def test_a_command_without_a_turn_has_no_value(commands: AgentStage) -> None:
    assert "ended without a turn" in check_failure(commands.play("print(1)")[0])


def test_threads_and_files_do_not_grow_with_episodes(commands: AgentStage) -> None:
    def count_resources() -> tuple[int, int]:
        process = commands.find_process()
        return process.num_threads(), process.num_fds()

    commands.play(*["turn(); print(1)"] * 4)
    before = count_resources()
    for _ in range(3):
        commands.play(*["turn(); print(1)"] * 4)
    until(lambda: all(now <= then for now, then in zip(count_resources(), before)), count_resources)


def test_an_address_of_another_machine_is_a_problem() -> None:
    spec = EnvironmentSpec("command", 20.0, agent=AgentSpec((sys.executable,), "192.0.2.1"))
    with EnvironmentPool({"agent": spec}, 2048, 1) as pool, pytest.raises(Exception, match=r"agent\.bind=192\.0\.2\.1"):
        pool.contracts()
