"""Workers: errors carry the worker's name and traceback, a dead or silent process is an error, never a wait.

Every test of a group runs twice: with ordinary calls and through a compiled graph, which must mean the same.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

import rlctl.workers.compiled_graph
import rlctl.workers.group
from rlctl.config.schema import CompiledGraphSection
from rlctl.launch.assemble_sft import ordinary_if_it_fails
from rlctl.launch.worker_imports import SHARED_SERVER
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.jsonl import read_records
from rlctl.utils.event_loop import EventLoop
from rlctl.workers import fork_server
from rlctl.workers.compiled_graph import GraphBroken, GraphUnavailable
from rlctl.workers.errors import WorkerDied, WorkerError, WorkerTimeout
from rlctl.workers.group import WorkerGroup, WorkerSpec
from tests import preloaded
from tests.faults.runs import survivors
from tests.waiting import PATIENCE_S, until

# Seconds of a wait for something that never comes. A call that returns within `PATIENCE_S` did not wait so long.
FOREVER_S = 10 * PATIENCE_S


@dataclass(frozen=True)
class MakeProbe:
    rank: int

    def __call__(self) -> "Probe":
        return Probe(self.rank)


@dataclass(frozen=True)
class Load:
    """Arguments of a call in the form that training loops send: arrays in a dataclass."""

    numbers: NDArray[np.float32]
    names: list[str]


class Probe:
    """Worker whose methods fail, hang or return as the test asks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # Local to this thread, like torch's grad mode.
        self.thread_state = threading.local()
        self.thread_state.mark = "mine"
        self.arrays: list[NDArray[np.float32]] = []

    def keep(self, load: Load) -> NDArray[np.float32]:
        """Keep the array of `load`. Return all arrays that were kept so far, stacked."""
        assert not load.numbers.flags.writeable
        self.arrays.append(load.numbers)
        return np.stack(self.arrays)

    def sum(self, load: Load, addend: int) -> int:
        return int(load.numbers.sum()) + addend

    def thread_mark(self) -> str | None:
        return getattr(self.thread_state, "mark", None)

    def add(self, first: int, second: int = 0) -> int:
        return self.rank + first + second

    def fail_on(self, rank: int) -> str:
        if self.rank == rank:
            raise ValueError(f"rank {rank} was told to fail")
        if self.rank + rank < 0:
            raise SystemExit(3)
        return "fine"

    def fail_or_wait(self, rank: int) -> None:
        self.fail_on(rank)
        time.sleep(FOREVER_S)

    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(7)
        time.sleep(FOREVER_S)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def linger(self, folder: Path) -> None:
        """Announce the worker, and stand still in one call, as if hanging, until the worker's pipe is opened."""
        pipe = folder / f"go-{self.rank}"
        os.mkfifo(pipe)
        (folder / f"here-{self.rank}").touch()
        pipe.read_bytes()

    def say(self, text: str) -> None:
        print(text)
        os.system(f"echo {text} from a child")


def make_group(logs: Path, compiled: bool, deadline_s: float = FOREVER_S) -> WorkerGroup:
    specs = [WorkerSpec(f"probe-{rank}", MakeProbe(rank), log=str(logs / f"probe-{rank}.log")) for rank in (0, 1)]
    workers = WorkerGroup(specs, deadline_s)
    workers.built().wait(PATIENCE_S)
    if compiled:
        workers.compile(1 << 16)
    return workers


@pytest.fixture(scope="module", params=[False, True], ids=["ordinary", "compiled"])
def group(ray_here: Path, request: pytest.FixtureRequest) -> Iterator[WorkerGroup]:
    """Start a group of workers that all tests share which break no worker."""
    workers = make_group(ray_here, request.param)
    assert (workers.graph is not None) == request.param
    yield workers
    workers.kill()


@pytest.fixture(params=[False, True], ids=["ordinary", "compiled"])
def fragile_group(ray_here: Path, request: pytest.FixtureRequest) -> Iterator[WorkerGroup]:
    workers = make_group(ray_here, request.param)
    yield workers
    begin = time.monotonic()
    workers.kill()
    assert time.monotonic() - begin < PATIENCE_S


def test_results_come_in_rank_order(group: WorkerGroup) -> None:
    assert group.call(Probe.add, 10, second=5) == [15, 16]
    assert group.run(Probe.add, [(1,), (2,)]) == [1, 3]
    assert group.start(Probe.add, 1).wait(PATIENCE_S) == [1, 2]


def test_an_error_names_the_worker_and_leaves_it_usable(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match="fail_on on probe-1: ValueError: rank 1 was told to fail") as error:
        group.call(Probe.fail_on, 1)
    assert "in fail_on" in error.value.tracebacks()
    with pytest.raises(WorkerError, match="fail_on on probe-0: SystemExit: 3"):
        group.call(Probe.fail_on, -1)
    assert group.call(Probe.fail_on, 2) == ["fine", "fine"]


# A graph's answers come together: the deadline ends such a call.
@pytest.mark.parametrize("fragile_group", [False], ids=["ordinary"], indirect=True)
def test_an_error_is_told_though_the_other_rank_waits_for_the_one_that_failed(
    fragile_group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a real run the other rank waits like this in a collective that the failed rank never joins."""
    monkeypatch.setattr(rlctl.workers.group, "_OTHERS_S", 1.0)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="probe-1: ValueError: rank 1 was told to fail") as error:
        fragile_group.call(Probe.fail_or_wait, 1)
    assert [failure.worker for failure in error.value.failures] == ["probe-1"]
    assert time.monotonic() - begin < PATIENCE_S


def test_arrays_are_the_workers_own_and_may_be_kept_on_both_sides(group: WorkerGroup) -> None:
    answers = []
    for step in range(4):
        loads = [Load(np.full(300_000, 10 * step + rank, np.float32), ["a"]) for rank in (0, 1)]
        answers.append(group.run(Probe.keep, [(load,) for load in loads]))
    for step, step_answers in enumerate(answers):
        for rank, rows in enumerate(step_answers):
            assert not rows.flags.writeable
            assert [row[0] for row in rows] == [10 * earlier_step + rank for earlier_step in range(step + 1)]


def test_a_large_argument_of_several_ranks_reaches_each_with_its_own_beside_it(group: WorkerGroup) -> None:
    load = Load(np.ones(300_000, np.float32), ["a"])
    for _ in range(2):
        assert group.run(Probe.sum, [(load, 1), (load, 2)]) == [300_001, 300_002]


def test_every_call_runs_on_the_thread_that_built_the_worker(group: WorkerGroup) -> None:
    assert group.call(Probe.thread_mark) == ["mine", "mine"]
    assert group.start(Probe.thread_mark).wait(PATIENCE_S) == ["mine", "mine"]


def test_an_argument_that_cannot_be_sent_costs_nothing(group: WorkerGroup) -> None:
    with pytest.raises(TypeError):
        group.call(Probe.add, threading.Lock())
    assert group.call(Probe.add, 1) == [1, 2]


def test_a_graph_that_breaks_before_a_call_is_begun_is_given_up_and_said(ray_here: Path) -> None:
    group = make_group(ray_here, compiled=False)
    warnings: list[str] = []
    try:
        group.compile(1 << 16, warnings.append)
        assert group.graph and group.call(Probe.add, 1) == [1, 2]
        group.graph._graph.teardown()
        assert group.call(Probe.add, 2) == [2, 3]
        assert len(warnings) == 1 and "hannel" in warnings[0]
        assert group.graph is None and group.call(Probe.thread_mark) == ["mine", "mine"]
    finally:
        group.kill()


def test_a_warm_up_that_fails_costs_the_graph_alone_unless_it_is_required(ray_here: Path) -> None:
    log = ray_here / "warm-up.jsonl"
    session: Any = SimpleNamespace(events=EventLog(log))
    group = make_group(ray_here, compiled=True)
    try:
        refusal = pytest.raises(
            GraphUnavailable, match=r"the compiled graph's warm-up failed: .*rank 1 was told to fail"
        )
        with refusal, ordinary_if_it_fails(CompiledGraphSection("require", None, None), group, session):
            group.call(Probe.fail_on, 1)
        assert read_records(log) == []
        with ordinary_if_it_fails(CompiledGraphSection(True, None, None), group, session):
            group.call(Probe.fail_on, 1)
        assert group.graph is None and group.call(Probe.add, 1) == [1, 2]
        (warning,) = read_records(log)
        assert warning["what"].startswith("the compiled graph's warm-up failed, the run goes on with ordinary calls: ")
    finally:
        group.kill()


def test_a_call_that_a_rank_has_begun_is_never_made_again(ray_here: Path) -> None:
    group = make_group(ray_here, compiled=False)
    warnings: list[str] = []
    try:
        group.compile(1 << 16, warnings.append)
        assert group.graph
        call = ("add", [(1,), (1,)], {})
        rlctl.workers.compiled_graph.ray.get(group.workers[1].handle.graph_call.remote(call, 1))
        group.graph._graph.teardown()
        with pytest.raises(GraphBroken, match="while probe-1 did add: how far is not known; resume"):
            group.call(Probe.add, 2)
        assert warnings == []
    finally:
        group.kill()


def test_a_death_shows_at_once_though_the_other_rank_still_works(fragile_group: WorkerGroup) -> None:
    begin = time.monotonic()
    with pytest.raises(WorkerDied) as error:
        fragile_group.call(Probe.die_on, 1)
    assert error.value.workers == ["probe-1"]
    assert time.monotonic() - begin < PATIENCE_S


def test_a_worker_killed_between_two_calls_is_named_in_the_next(fragile_group: WorkerGroup) -> None:
    process = psutil.Process(fragile_group.workers[0].pid())
    process.kill()
    assert survivors([process]) == []
    with pytest.raises(WorkerDied) as error:
        fragile_group.call(Probe.add, 1)
    assert error.value.workers == ["probe-0"]


def test_a_silent_worker_is_an_error_that_names_it_and_the_knob(fragile_group: WorkerGroup) -> None:
    fragile_group.deadline_s = 1.0
    with pytest.raises(WorkerTimeout, match=r"probe-0.* to finish sleep; .* raise run.deadline_s"):
        fragile_group.run(Probe.sleep, [(FOREVER_S,), (0,)])


def test_an_idle_group_burns_next_to_nothing(group: WorkerGroup) -> None:
    group.call(Probe.add, 1)
    processes = [psutil.Process(worker.pid()) for worker in group.workers] + [psutil.Process()]
    cpu_shares: list[float] = []

    def is_idle() -> bool:
        cpu_before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(3.0)
        cpu_after = [sum(process.cpu_times()[:2]) for process in processes]
        # In place: `until` shows the last shares.
        cpu_shares[:] = [(after - before) / 3.0 for before, after in zip(cpu_before, cpu_after)]
        return max(cpu_shares) < 0.2

    # A polling wait burns time in every three seconds; leftover work of another test ends.
    until(is_idle, lambda: cpu_shares, within_s=60)


def test_without_the_api_that_was_tested_there_is_no_graph_and_ordinary_calls_go_on(
    ray_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rlctl.workers.compiled_graph, "TESTED", ((2, 40), (2, 41)))
    group = make_group(ray_here, compiled=False)
    try:
        with pytest.raises(GraphUnavailable, match=r"Ray 2.* is none of the releases that this was tested with"):
            group.compile(1 << 16)
        assert group.graph is None
        assert group.call(Probe.add, 1) == [1, 2]
    finally:
        group.kill()


def test_a_worker_that_cannot_be_built_says_why(ray_here: Path) -> None:
    workers = WorkerGroup([WorkerSpec("broken", FailingMake())], deadline_s=PATIENCE_S)
    try:
        with pytest.raises(WorkerError, match="start-up on broken: OSError: no such model"):
            workers.built().wait(PATIENCE_S)
    finally:
        workers.kill()


@dataclass(frozen=True)
class FailingMake:
    def __call__(self) -> None:
        raise OSError("no such model")


def test_a_signal_makes_a_worker_say_where_it_is(ray_here: Path, tmp_path: Path) -> None:
    # No shared workers: CPython reads frames that may change, so a process can die of this signal, then or later.
    workers = make_group(tmp_path, compiled=False)
    logs = [tmp_path / f"probe-{rank}.log" for rank in (0, 1)]
    try:
        lingering = workers.start(Probe.linger, tmp_path)
        until(lambda: all((tmp_path / f"here-{rank}").exists() for rank in (0, 1)))
        os.kill(workers.workers[0].pid(), signal.SIGUSR1)
        # The main thread, which began all others, is written last. A worker may be forked from a process of the suite.
        until(lambda: logs[0].read_text().endswith(("in <module>\n", "in _run_module_as_main\n")))
        assert "in linger" in logs[0].read_text()
        for rank in (0, 1):
            (tmp_path / f"go-{rank}").write_bytes(b"")
        lingering.wait(PATIENCE_S)
        assert "in linger" not in logs[1].read_text()
    finally:
        workers.kill()


@pytest.mark.skipif(SHARED_SERVER not in os.environ, reason="with a CUDA device workers start as usual")
def test_workers_of_the_suite_are_forked_from_a_server_with_their_imports_done(ray_here: Path, tmp_path: Path) -> None:
    """A server that is lost would make the suite twice as slow, and nothing else would show it."""
    workers = make_group(tmp_path, compiled=False)
    try:
        server = psutil.Process(workers.workers[0].pid()).parent()
        assert server is not None and fork_server.__file__ in server.cmdline()
    finally:
        workers.kill()
    assert preloaded.describe_lost_stages() == []


def test_all_output_of_a_worker_goes_to_its_own_log(group: WorkerGroup, ray_here: Path) -> None:
    group.call(Probe.say, "hello")
    text = (ray_here / "probe-1.log").read_text()
    assert "hello\n" in text
    assert "hello from a child" in text


def test_a_call_that_an_event_loop_awaits_has_the_errors_of_one_that_a_thread_waits_for(
    ray_here: Path, tmp_path: Path
) -> None:
    workers = make_group(tmp_path, compiled=False)
    events = EventLoop("calls")
    worker = workers.workers[0]
    try:
        assert events.run(worker.call(PATIENCE_S, Probe.add, 3, second=4)) == 7
        with pytest.raises(WorkerError, match="fail_on on probe-0: ValueError: rank 0 was told to fail"):
            events.run(worker.call(PATIENCE_S, Probe.fail_on, 0))
        with pytest.raises(WorkerTimeout, match=r"the driver waited 0 s for probe-0 to finish sleep"):
            events.run(worker.call(0.2, Probe.sleep, 1.0))
        with pytest.raises(WorkerDied, match="probe-0 died during die_on"):
            events.run(worker.call(PATIENCE_S, Probe.die_on, 0))
        events.close()
    finally:
        workers.kill()
