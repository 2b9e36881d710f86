"""Environments that hang, die or eat memory cost their own episodes, never the driver or another's."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlctl.config.sandbox_schema import SandboxName
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.environment_process import FAILURES_IN_A_ROW
from rlctl.environments.outcomes import EnvironmentFailure, EnvironmentSpec
from rlctl.environments.tool_formats import ToolCall
from tests.unit.environments.pools import SELECTED, begin_episodes, call_select, failure_of, open_pool, run_code
from tests.unit.sandbox.kinds import LOCAL_KINDS, local_sandbox

pytestmark = pytest.mark.usefixtures("own_file")
# Every reset needs a descriptor. One tool leaks all descriptors, the other takes them away.
OPENS = """
import os, resource

leaked = []

class Opens:
    def reset(self, raises=False, **row):
        if raises:
            raise ValueError("a bad row")
        open(__file__).close()

    def get_reward(self):
        return 1.0

    def leak(self) -> str:
        \"\"\"Leak all descriptors.\"\"\"
        while True:
            leaked.append(os.open(__file__, os.O_RDONLY))

    def limit(self) -> str:
        \"\"\"Lower the limit.\"\"\"
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""


@contextmanager
def open_hurried_pool() -> Iterator[EnvironmentPool]:
    """Open a pool of two environments in one process: `own`, and `hurried`, whose actions have a limit of 1.5 s."""
    specs = {"own": EnvironmentSpec("own.py:Own", 120.0), "hurried": EnvironmentSpec("own.py:Own", 1.5)}
    with EnvironmentPool(specs, 2048, 1) as pool:
        yield pool


def family_of(pool: EnvironmentPool) -> list[psutil.Process]:
    """Return the outer supervisor of a pool's only process, the inner one, and the process itself."""
    (outer_pid,) = pool.pids()
    outer = psutil.Process(outer_pid)
    (inner,) = outer.children()
    (process,) = inner.children()
    return [outer, inner, process]


def test_a_reset_that_hangs_costs_its_episode_and_its_process_takes_no_new_ones() -> None:
    with open_hurried_pool() as pool:
        begin_episodes(pool, "before", environment="own")
        (first_pid,) = pool.pids()
        failure = failure_of(pool.reset("hangs", {"hang": True, "environment": "hurried"}, seed=1).result())
        assert (failure.kind, str(failure)) == ("timeout", "reset took longer than 1.5 s")
        # Episodes of this process go on. New episodes begin in another process.
        assert call_select(pool, "before") == SELECTED
        begin_episodes(pool, "after", environment="own")
        assert len(pool.pids()) == 2 and psutil.pid_exists(first_pid)
        assert pool.close("before").result() is None
        assert not psutil.pid_exists(first_pid)
        assert call_select(pool, "after") == SELECTED


def test_a_tool_that_hangs_is_no_answer_of_its_own_kind() -> None:
    with open_hurried_pool() as pool:
        begin_episodes(pool, "a", environment="hurried")
        failure = failure_of(pool.call("a", [ToolCall("sleep", {"seconds": 1000})]).result())
        assert (failure.kind, failure.cause) == ("timeout", "call took longer than 1.5 s")
        assert pool.failures.counts == {"hurried: call took longer than 1.5 s": 1}


def test_a_process_that_is_killed_costs_its_episodes_and_is_replaced() -> None:
    with open_pool() as pool:
        begin_episodes(pool, "a", "b")
        sleeping = pool.call("a", [ToolCall("sleep", {"seconds": 1000})])
        _, _, process = family_of(pool)
        process.send_signal(signal.SIGKILL)
        for outcome in (sleeping.result(), pool.reward("b").result()):
            failure = failure_of(outcome)
            assert (failure.kind, failure.detail) == ("died", "SIGKILL")
        begin_episodes(pool, "c")
        assert call_select(pool, "c") == SELECTED


@pytest.mark.parametrize("victim", ["inner", "outer", "group of the outer"])
def test_an_environment_that_kills_a_supervisor_leaves_nothing_running(victim: str) -> None:
    leave_sleeper = "subprocess.Popen(['sleep', '600'], env={}, start_new_session=True).pid"
    kill_by_victim = {
        "inner": "os.kill(os.getppid(), 9)",
        "outer": "os.kill(int(open(f'/proc/{os.getppid()}/stat').read().split()[3]), 9)",
        "group of the outer": "os.killpg(int(open(f'/proc/{os.getppid()}/stat').read().split()[3]), 9)",
    }
    with open_pool() as pool:
        begin_episodes(pool, "a")
        (sleeper_pid,) = run_code(pool, "a", leave_sleeper).result()
        processes = [*family_of(pool), psutil.Process(int(sleeper_pid.content))]
        failure = failure_of(run_code(pool, "a", f"({kill_by_victim[victim]}, time.sleep(600))").result())
        assert (failure.kind, failure.detail) == ("died", "SIGKILL")
        assert psutil.wait_procs(processes, timeout=60)[1] == []
        begin_episodes(pool, "b")
        assert call_select(pool, "b") == SELECTED


def play_opens(pool: EnvironmentPool, seed: int, tool: str | None = None, **row: Any) -> object:
    """Play an episode of `Opens`; return its first outcome."""
    episode = object()
    outcome = pool.reset(episode, row, seed).result()
    if not isinstance(outcome, EnvironmentFailure):
        pool.reward(episode).result()
        if tool is not None:
            pool.call(episode, [ToolCall(tool, {})]).result()
    pool.close(episode).result()
    return outcome


@pytest.mark.parametrize("damage", ["leak", "limit"])
def test_a_damaged_process_that_lives_is_replaced(own_file: Path, damage: str) -> None:
    own_file.write_text(OPENS)
    events = list[str]()
    spec = EnvironmentSpec("own.py:Opens", 120.0)
    with EnvironmentPool({"own": spec}, 2048, 1, emit=lambda kind, **fields: events.append(fields["what"])) as pool:
        play_opens(pool, 0, damage)
        (damaged_pid,) = pool.pids()
        outcomes = [play_opens(pool, seed) for seed in range(FAILURES_IN_A_ROW + 2)]
        failures = [outcome for outcome in outcomes if isinstance(outcome, EnvironmentFailure)]
        assert failures == outcomes[:FAILURES_IN_A_ROW]
        assert damaged_pid not in pool.pids() and not psutil.pid_exists(damaged_pid)
    assert events[-1].startswith(
        "environment process: another one takes its place, since 8 tries in a row failed in it: "
    )
    assert events[-1].endswith(f"Too many open files: '{own_file}'")


def test_a_process_is_not_blamed_for_its_environment(own_file: Path) -> None:
    own_file.write_text(OPENS)
    with EnvironmentPool({"own": EnvironmentSpec("own.py:Opens", 120.0)}, 2048, 1) as pool:
        for seed in range(20):
            outcome = play_opens(pool, seed, raises=True)
            assert isinstance(outcome, EnvironmentFailure), "nothing ever ended well"
        (pid,) = pool.pids()
        play_opens(pool, 0)
        for _ in range(20):
            assert isinstance(play_opens(pool, 1, raises=True), EnvironmentFailure), "one task is bad"
        assert pool.pids() == [pid]


def test_memory_without_end_ends_the_process_and_the_bound_is_told() -> None:
    with open_pool(memory_mib=256) as pool:
        begin_episodes(pool, "a")
        code = "[(time.sleep(0.01), b'x' * (8 << 20))[1] for _ in iter(int, 1)]"
        failure = failure_of(run_code(pool, "a", code).result())
        assert (failure.kind, failure.cause) == ("memory", "its process used more than 256 MiB")
        begin_episodes(pool, "b")
        # A call that Python itself refuses is the same failure, and no text for the model.
        assert failure_of(run_code(pool, "b", "bytearray(1 << 60)").result()).cause == "call raised MemoryError"


def test_memory_of_children_counts() -> None:
    with open_pool(memory_mib=256) as pool:
        begin_episodes(pool, "a")
        hungry_code = "import time; x = b'x' * (400 << 20); time.sleep(1000)"
        failure = failure_of(run_code(pool, "a", f"subprocess.run([sys.executable, '-c', {hungry_code!r}])").result())
        assert failure.kind == "memory"


SANDBOXED = """(
    base := __import__("importlib").import_module("rlctl.sandbox.base"),
    __import__("importlib").import_module("rlctl.sandbox.open_sandbox").open_sandbox("{kind}").run(
        base.Program(source="import time; x = b'x' * (400 << 20); time.sleep(2.5); print('done')"),
        base.Limits(memory_mib=600),
    ).stdout,
)[1]"""


@pytest.mark.parametrize("kind", LOCAL_KINDS)
def test_memory_of_programs_in_a_sandbox_does_not_count(kind: SandboxName) -> None:
    local_sandbox(kind)
    with open_pool(memory_mib=256) as pool:
        begin_episodes(pool, "a")
        # Memory of children is measured each second.
        assert "done" in str(run_code(pool, "a", SANDBOXED.format(kind=kind)).result())


@pytest.mark.parametrize(("end", "kind"), [("exit", "raised"), ("os._exit", "died")])
def test_an_end_in_the_constructor_is_a_failure(end: str, kind: str) -> None:
    with open_pool(args={"end": end}) as pool:
        failure = failure_of(pool.reset("a", {}, seed=1).result())
        assert failure.kind == kind
        if kind == "raised":
            assert "own.py:13" in str(failure)
        else:
            assert failure.detail == "exit code 3"


@pytest.mark.parametrize("line", ["hello", '{"action": 99, "value": 1}', '{"action": [], "value": 1}', "[" * 100_000])
def test_whoever_writes_into_the_connection_ends_the_process(line: str) -> None:
    with open_pool() as pool:
        begin_episodes(pool, "a")
        failure = failure_of(run_code(pool, "a", f"speak({line!r})").result())
        assert failure.kind == "died" and "not its own" in failure.cause
        begin_episodes(pool, "b")


def test_what_an_environment_forks_never_answers_for_it() -> None:
    with open_pool() as pool:
        begin_episodes(pool, "a")
        (result,) = run_code(pool, "a", "os.fork() and 'parent' or 'child'").result()
        assert result.content == "parent" and call_select(pool, "a") == SELECTED


def test_a_machine_that_starts_no_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    with open_pool() as pool:
        with monkeypatch.context() as patched:
            patched.setattr("rlctl.workers.guarded_process.subprocess.Popen", refuse)
            failure = failure_of(pool.reset("a", {}, 1).result())
        assert failure.kind == "died" and "temporarily unavailable" in str(failure)
        begin_episodes(pool, "b")
