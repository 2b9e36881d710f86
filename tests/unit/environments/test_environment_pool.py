"""Environments that raise, hang, die, print or eat memory cost their own episodes, never the driver or another's."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlctl.environments.environment_pool import EnvironmentPool, UnusableEnvironmentError
from rlctl.environments.environment_process import FAILURES_IN_A_ROW
from rlctl.environments.outcomes import EnvironmentFailure, EnvironmentSpec, ToolResult
from rlctl.environments.tool_formats import MalformedCall, ToolCall
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.jsonl import read_records
from rlctl.workers.user_logs import MAX_LOG_BYTES

OWN = """
import asyncio, ctypes, json, os, random, sqlite3, subprocess, sys, threading, time

def speak(line):
    for number in os.listdir("/proc/self/fd"):
        if os.path.islink(link := f"/proc/self/fd/{number}") and "socket" in os.readlink(link):
            os.write(int(number), line.encode() + b"\\n")

class Own:
    def __init__(self, end=None):
        if end == "exit":
            sys.exit(3)
        if end == "os._exit":
            os._exit(3)

    def reset(self, hang=False, raises=False, value="ready", **row):
        if hang:
            time.sleep(1000)
        if raises:
            raise KeyError("no such board")
        self.database, self.closed = sqlite3.connect(":memory:"), row.get("closed")
        self.row = row
        return value

    def get_reward(self):
        return self.row.get("reward", 1.0)

    def step(self, message):
        if message == "wrong":
            return 3
        return None if message == "end" else message.upper()

    def close(self):
        if self.closed:
            open(self.closed, "w").close()
        self.database.close()

    def select(self) -> str:
        \"\"\"Ask a database that serves the thread that opened it.\"\"\"
        return self.database.execute("select 6 * 7").fetchone()[0]

    def sleep(self, seconds: float) -> str:
        \"\"\"Sleep.

        Args:
            seconds: How long.
        \"\"\"
        time.sleep(seconds)
        return "slept"

    async def wait(self, seconds: float) -> str:
        \"\"\"Wait.

        Args:
            seconds: How long.
        \"\"\"
        await asyncio.sleep(seconds)
        return f"waited, {random.random()}"

    def _met(self, number, of):
        open(f"met-{number}", "w").close()
        return os.path.exists("go") and all(os.path.exists(f"met-{each}") for each in range(of))

    def meet(self, number: int, of: int) -> str:
        \"\"\"Wait for the others, and for the file `go`.

        Args:
            number: Of this one.
            of: How many there are.
        \"\"\"
        while not self._met(number, of):
            time.sleep(0.01)
        return "met"

    async def meet_later(self, number: int, of: int) -> str:
        \"\"\"Wait for the others without holding a thread.

        Args:
            number: Of this one.
            of: How many there are.
        \"\"\"
        while not self._met(number, of):
            await asyncio.sleep(0.01)
        return "met"

    def run(self, code: str) -> object:
        \"\"\"Run Python.

        Args:
            code: An expression.
        \"\"\"
        return eval(code)
"""
# Every reset needs a descriptor; a tool leaks all, or takes them away.
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
FINE = [ToolResult("select", "42", failed=False)]


@contextmanager
def pool_of(
    timeout_s: float = 120.0, processes: int = 1, memory_mib: int = 2048, **more: Any
) -> Iterator[EnvironmentPool]:
    spec = EnvironmentSpec("own.py:Own", timeout_s, more.pop("args", {}))
    with EnvironmentPool({"own": spec}, memory_mib, processes, **more) as pool:
        yield pool


@contextmanager
def pool_with_a_hurried_one(timeout_s: float) -> Iterator[EnvironmentPool]:
    """Yield a pool of two environments in one process: `own`, and `hurried`, whose actions have less time."""
    specs = {name: EnvironmentSpec("own.py:Own", s, {}) for name, s in (("own", 120.0), ("hurried", timeout_s))}
    with EnvironmentPool(specs, 2048, 1) as pool:
        yield pool


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def begun(pool: EnvironmentPool, *episodes: object, **row: Any) -> None:
    outcomes = [each.result() for each in [pool.reset(episode, row, seed=1) for episode in episodes]]
    assert outcomes == ["ready"] * len(episodes)


def select(pool: EnvironmentPool, episode: object) -> object:
    return pool.call(episode, [ToolCall("select", {})]).result()


def run(pool: EnvironmentPool, episode: object, code: str) -> "Future[Any]":
    return pool.call(episode, [ToolCall("run", {"code": code})])


def failed(outcome: object) -> EnvironmentFailure:
    assert isinstance(outcome, EnvironmentFailure), outcome
    return outcome


def worker_of(pool: EnvironmentPool) -> psutil.Process:
    return family_of(pool)[-1]


def family_of(pool: EnvironmentPool) -> list[psutil.Process]:
    """The outer supervisor of a pool's only process, the inner one, and the process itself."""
    (outer,) = pool.pids()
    (inner,) = psutil.Process(outer).children()
    (process,) = inner.children()
    return [psutil.Process(outer), inner, process]


def test_an_episode_has_one_thread_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    with pool_of() as pool:
        begun(pool, "a", closed=str(tmp_path / "closed"))
        assert [select(pool, "a"), select(pool, "a")] == [FINE, FINE]
        assert pool.step("a", "hello").result() == "HELLO" and pool.step("a", "end").result() is None
        assert pool.reward("a").result() == 1.0
        assert pool.close("a").result() is None and (tmp_path / "closed").exists()
        assert failed(pool.reward("a").result()).kind == "contract"
        assert pool.close("a").result() is None


def test_a_slow_tool_holds_up_nobody_else() -> None:
    with pool_of() as pool:
        begun(pool, *range(8))
        # Each waits for all: one after another they would never end.
        slow = [pool.call(number, [ToolCall("meet", {"number": number, "of": 9})]) for number in range(7)]
        slow.append(pool.call(7, [ToolCall("meet_later", {"number": number, "of": 9}) for number in (7, 8)]))
        begun(pool, "quick")
        assert select(pool, "quick") == FINE
        assert not any(each.done() for each in slow)
        Path("go").touch()
        assert all(isinstance(each.result(), list) for each in slow)


def test_a_coroutine_draws_from_its_own_episodes_generator() -> None:
    with pool_of() as pool:
        begun(pool, "a", "b")
        calls = [pool.call(episode, [ToolCall("wait", {"seconds": 0.05})]) for episode in ("a", "b")]
        first, second = (each.result() for each in calls)
        assert first == second and select(pool, "a") == FINE


def test_a_reset_that_hangs_costs_its_episode_and_its_process_takes_no_new_ones() -> None:
    with pool_with_a_hurried_one(1.5) as pool:
        begun(pool, "before", environment="own")
        (first,) = pool.pids()
        failure = failed(pool.reset("hangs", {"hang": True, "environment": "hurried"}, seed=1).result())
        assert (failure.kind, str(failure)) == ("timeout", "reset took longer than 1.5 s")
        # Episodes of the process go on; new ones begin elsewhere.
        assert select(pool, "before") == FINE
        begun(pool, "after", environment="own")
        assert len(pool.pids()) == 2 and psutil.pid_exists(first)
        assert pool.close("before").result() is None
        assert not psutil.pid_exists(first)
        assert select(pool, "after") == FINE


def test_a_tool_that_hangs_is_no_answer_of_its_own_kind() -> None:
    with pool_with_a_hurried_one(1.5) as pool:
        begun(pool, "a", environment="hurried")
        failure = failed(pool.call("a", [ToolCall("sleep", {"seconds": 1000})]).result())
        assert (failure.kind, failure.cause) == ("timeout", "call took longer than 1.5 s")
        assert pool.failures.counts == {"hurried: call took longer than 1.5 s": 1}


def test_a_process_that_is_killed_costs_its_episodes_and_is_replaced() -> None:
    with pool_of() as pool:
        begun(pool, "a", "b")
        waiting = pool.call("a", [ToolCall("sleep", {"seconds": 1000})])
        worker_of(pool).send_signal(signal.SIGKILL)
        for outcome in (waiting.result(), pool.reward("b").result()):
            assert (failed(outcome).kind, failed(outcome).detail) == ("died", "SIGKILL")
        begun(pool, "c")
        assert select(pool, "c") == FINE


@pytest.mark.parametrize("whom", ["inner", "outer", "group of the outer"])
def test_an_environment_that_kills_a_supervisor_leaves_nothing_running(whom: str) -> None:
    leave = "subprocess.Popen(['sleep', '600'], env={}, start_new_session=True).pid"
    victim = {
        "inner": "os.kill(os.getppid(), 9)",
        "outer": "os.kill(int(open(f'/proc/{os.getppid()}/stat').read().split()[3]), 9)",
        "group of the outer": "os.killpg(int(open(f'/proc/{os.getppid()}/stat').read().split()[3]), 9)",
    }[whom]
    with pool_of() as pool:
        begun(pool, "a")
        family = family_of(pool)
        (left,) = run(pool, "a", leave).result()
        family.append(psutil.Process(int(left.content)))
        failure = failed(run(pool, "a", f"({victim}, time.sleep(600))").result())
        assert (failure.kind, failure.detail) == ("died", "SIGKILL")
        assert psutil.wait_procs(family, timeout=60)[1] == []
        begun(pool, "b")
        assert select(pool, "b") == FINE


def played(pool: EnvironmentPool, seed: int, tool: str | None = None, **row: Any) -> object:
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
def test_a_damaged_process_that_lives_is_replaced(tmp_path: Path, damage: str) -> None:
    (tmp_path / "own.py").write_text(OPENS)
    told = list[str]()
    spec = EnvironmentSpec("own.py:Opens", 120.0)
    with EnvironmentPool({"own": spec}, 2048, 1, emit=lambda _, what: told.append(what)) as pool:
        played(pool, 0, damage)
        (damaged,) = pool.pids()
        outcomes = [played(pool, seed) for seed in range(FAILURES_IN_A_ROW + 2)]
        failures = [outcome for outcome in outcomes if isinstance(outcome, EnvironmentFailure)]
        assert failures == outcomes[:FAILURES_IN_A_ROW]
        assert damaged not in pool.pids() and not psutil.pid_exists(damaged)
    assert told[-1].startswith(
        "environment process: another one takes its place, since 8 tries in a row failed in it: "
    )
    assert told[-1].endswith(f"Too many open files: '{tmp_path}/own.py'")


def test_a_process_is_not_blamed_for_its_environment(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OPENS)
    with EnvironmentPool({"own": EnvironmentSpec("own.py:Opens", 120.0)}, 2048, 1) as pool:
        for seed in range(20):
            assert isinstance(played(pool, seed, raises=True), EnvironmentFailure), "nothing ever ended well"
        (pid,) = pool.pids()
        played(pool, 0)
        for _ in range(20):
            assert isinstance(played(pool, 1, raises=True), EnvironmentFailure), "one task is bad"
        assert pool.pids() == [pid]


def test_memory_without_end_ends_the_process_and_the_bound_is_told() -> None:
    with pool_of(memory_mib=256) as pool:
        begun(pool, "a")
        code = "[(time.sleep(0.01), b'x' * (8 << 20))[1] for _ in iter(int, 1)]"
        failure = failed(run(pool, "a", code).result())
        assert (failure.kind, failure.cause) == ("memory", "its process used more than 256 MiB")
        begun(pool, "b")
        # A call that Python itself refuses is the same failure, and no text for the model.
        assert failed(run(pool, "b", "bytearray(1 << 60)").result()).cause == "call raised MemoryError"


def test_memory_of_children_counts() -> None:
    with pool_of(memory_mib=256) as pool:
        begun(pool, "a")
        hungry = "import time; x = b'x' * (400 << 20); time.sleep(1000)"
        failure = failed(run(pool, "a", f"subprocess.run([sys.executable, '-c', {hungry!r}])").result())
        assert failure.kind == "memory"


@pytest.mark.parametrize(("end", "kind"), [("exit", "raised"), ("os._exit", "died")])
def test_an_end_in_the_constructor_is_a_failure(end: str, kind: str) -> None:
    with pool_of(args={"end": end}) as pool:
        failure = failed(pool.reset("a", {}, seed=1).result())
        assert failure.kind == kind
        assert "own.py:12" in str(failure) if kind == "raised" else failure.detail == "exit code 3"


def test_what_a_reset_raises_has_its_place_and_its_traceback(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    with pool_of(logs=tmp_path, emit=events.emit) as pool:
        failure = failed(pool.reset("a", {"raises": True}, seed=1).result())
        begun(pool, "b")
    assert str(failure) == "reset raised KeyError at own.py:20: 'no such board'"
    assert failure.kind == "raised" and "KeyError" in (tmp_path / "environment-errors.log").read_text()
    (event,) = read_records(tmp_path / "events.jsonl")
    assert event["what"].startswith(
        "environment own: reset raised KeyError at own.py:20: 'no such board'; its episodes are played again, "
        "environment.max_retries times at most, or else left out and counted, environment/failed; traceback: "
    )


def test_the_first_error_of_each_cause_in_a_tool_is_told_with_its_line_and_its_traceback(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    typo, unfit = ToolCall("run", {"code": "self.databse"}), ToolCall("run", {"cod": "1"})
    asleep = ToolCall("wait", {"seconds": "long"})
    with pool_of(logs=tmp_path, emit=events.emit) as pool:
        begun(pool, "a", "b")
        results = pool.call("a", [typo, unfit, asleep, ToolCall("none", {}), typo]).result()
        assert not isinstance(results, EnvironmentFailure)
        assert pool.call("b", [typo]).result() == results[:1]
        assert pool.tool_errors.most_common() == "run: raised AttributeError at own.py:92 (3 times)"
    line, later = "raised AttributeError at own.py:92", "raised TypeError at own.py:57"
    assert [one.failed for one in results] == [True] * 5
    assert [one.raised for one in results] == [line, "", later, "", line]
    first, second = [event["what"] for event in read_records(tmp_path / "events.jsonl")]
    assert first.startswith(f"tool run: {line}: 'Own' object has no attribute 'databse'")
    assert "; the model reads the error, and the episode goes on, environment/tool_raised; traceback: " in first
    assert second.startswith(f"tool wait: {later}: ")
    assert "AttributeError" in (tmp_path / "tool-errors.log").read_text()


@pytest.mark.parametrize("row", [{"value": 3}, {"value": [{"type": "image"}]}])
def test_a_value_of_the_wrong_type_breaks_the_contract(row: dict[str, Any]) -> None:
    with pool_of() as pool:
        assert failed(pool.reset("a", row, seed=1).result()).kind == "contract"
        begun(pool, "b", reward="high")
        assert "get_reward must return a finite number" in str(failed(pool.reward("b").result()))
        begun(pool, "c")
        assert failed(pool.step("c", "wrong").result()).kind == "contract"


def test_output_without_end_is_bounded_and_waits_for_nobody(tmp_path: Path) -> None:
    with pool_of(logs=tmp_path) as pool:
        begun(pool, "a", "b")
        run(pool, "a", "[print('x' * 100_000) for _ in iter(int, 1)]")
        log = tmp_path / "environments.log"
        while not log.exists() or log.stat().st_size <= MAX_LOG_BYTES:
            time.sleep(0.01)
        assert select(pool, "b") == FINE
    assert log.stat().st_size <= MAX_LOG_BYTES + 1000


def test_long_results_and_odd_characters_reach_the_driver_as_text() -> None:
    with pool_of() as pool:
        begun(pool, "a")
        (long,) = run(pool, "a", "'é' * 1_000_000").result()
        assert len(long.content) < 300_000 and long.content.endswith("characters]")
        (odd,) = run(pool, "a", """json.loads('"\\\\ud83d"')""").result()
        assert odd.content.encode() == b"?"
        (raised,) = run(pool, "a", "1 / 0").result()
        assert raised == ToolResult("run", "Error: division by zero", True, "raised ZeroDivisionError at own.py:92")


def test_calls_are_answered_in_order_the_malformed_ones_too() -> None:
    with pool_of() as pool:
        begun(pool, "a")
        calls = [
            MalformedCall("not JSON"),
            ToolCall("wait", {"seconds": 0}),
            ToolCall("select", {}),
            ToolCall("reset", {}),
        ]
        named = "the tools are meet, meet_later, run, select, sleep, wait"
        first, second, third, fourth = pool.call("a", calls).result()  # type: ignore[misc]
        assert first.message() == {"role": "tool", "content": "Error: no tool was called: not JSON"}
        assert second.content.startswith("waited") and third == FINE[0]
        assert fourth.message() == {
            "role": "tool",
            "name": "reset",
            "content": f"Error: there is no tool 'reset'; {named}",
        }


@pytest.mark.parametrize("line", ["hello", '{"action": 99, "value": 1}', '{"action": [], "value": 1}', "[" * 100_000])
def test_whoever_writes_into_the_connection_ends_the_process(line: str) -> None:
    with pool_of() as pool:
        begun(pool, "a")
        failure = failed(run(pool, "a", f"speak({line!r})").result())
        assert failure.kind == "died" and "not its own" in failure.cause
        begun(pool, "b")


def test_what_an_environment_forks_never_answers_for_it() -> None:
    with pool_of() as pool:
        begun(pool, "a")
        (result,) = run(pool, "a", "os.fork() and 'parent' or 'child'").result()
        assert result.content == "parent" and select(pool, "a") == FINE


def test_everything_ends_with_the_pool() -> None:
    with pool_of(processes=2) as pool:
        begun(pool, "a", "b")
        waiting = pool.call("a", [ToolCall("sleep", {"seconds": 1000})])
        pids = pool.pids()
        assert len(pids) == 2
    assert failed(waiting.result()).kind == "died"
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="shut down"):
        pool.reset("c", {}, 1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own.py:Nothing", "own.py has no Nothing"),
        ("nowhere.py:Own", "cannot import: FileNotFoundError"),
        ("broken.py:Own", "cannot import: ZeroDivisionError: division by zero at broken.py:2"),
        ("ends.py:Own", "an environment ended its process while loading: exit code 4"),
        ("bare.py:Bare", "has no method reset"),
    ],
)
def test_an_environment_that_cannot_be_used_says_why(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    (tmp_path / "ends.py").write_text("import os\nos._exit(4)\n")
    (tmp_path / "bare.py").write_text("class Bare:\n    pass\n")
    with EnvironmentPool({"own": EnvironmentSpec(name, 5.0)}, 1024, 1) as pool:
        with pytest.raises(UnusableEnvironmentError) as error:
            pool.contracts()
        assert said in str(error.value)
        assert failed(pool.reset("a", {}, 1).result()).kind in ("contract", "died")


def test_a_machine_that_starts_no_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: Any, **more: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    with pool_of() as pool:
        with monkeypatch.context() as patched:
            patched.setattr("rlctl.workers.guarded_process.subprocess.Popen", refuse)
            failure = failed(pool.reset("a", {}, 1).result())
        assert failure.kind == "died" and "temporarily unavailable" in str(failure)
        begun(pool, "b")


def test_a_row_must_name_one_of_several(tmp_path: Path) -> None:
    specs = {"one": EnvironmentSpec("own.py:Own", 5.0), "two": EnvironmentSpec("own.py:Own", 5.0)}
    with EnvironmentPool(specs, 1024, 1) as pool:
        failure = failed(pool.reset("a", {"environment": "three"}, 1).result())
        assert str(failure) == "no such environment: a row must name one of one, two: 'three'"
        assert pool.reset("b", {"environment": "two"}, 1).result() == "ready"
