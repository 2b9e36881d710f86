"""`rlctl bench dispatch`: what one call to a group of workers costs the driver, ordinary against compiled graph."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from rlctl.workers.graph import GraphUnavailable
from rlctl.workers.group import WorkerGroup, WorkerSpec

_DEADLINE_S = 300.0
_BUFFER_BYTES = 1 << 20
_IDLE_S = 2.0
# A row ends after so many seconds, though it has not made all of its calls.
_ROW_S = 10.0


class Echo:
    """A worker that takes a payload and says how much it got."""

    def take(self, payload: NDArray[np.uint8]) -> int:
        """Its bytes."""
        return len(payload)


@dataclass(frozen=True)
class DispatchBench:
    """workers: sizes of the groups. payloads: bytes that every worker gets with a call. calls: of a row, at most."""

    workers: tuple[int, ...]
    payloads: tuple[int, ...]
    calls: int


@dataclass(frozen=True)
class Spread:
    """Seconds of the calls of a row."""

    median: float
    p99: float
    calls: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """Of what was measured."""
        return cls(median(seconds), float(np.percentile(seconds, 99)), len(seconds))


# Round trip and submission through a bare graph.
Floor = tuple[Spread | None, Spread | None]


@dataclass(frozen=True)
class DispatchRow:
    """One size of group and payload. compiled and submit, the part of it before the driver waits: None without a
    graph, whose reason `why` says. plain: through a graph over bare actors, which have no thread of their own, copy
    nothing, and spin while they wait; plain_submit: the same part of a call whose payload is bytes, which Ray hands on
    as they are: the floors. idle: cores that the busiest worker burns while nobody calls it.
    """

    workers: int
    payload: int
    ordinary: Spread
    compiled: Spread | None
    submit: Spread | None
    plain: Spread | None
    plain_submit: Spread | None
    idle: float
    why: str

    @property
    def ratio(self) -> float | None:
        """How much faster the compiled call is, at the median."""
        return None if self.compiled is None else self.ordinary.median / self.compiled.median

    def as_json(self) -> dict[str, Any]:
        """With the ratio."""
        return {**asdict(self), "ratio": self.ratio}


def run_dispatch_bench(bench: DispatchBench, logs: str, say: Callable[[str], None]) -> list[DispatchRow]:
    """Needs a running Ray."""
    # First of all: once a graph of ours stands, this process reads channels as ours does.
    plain = {count: _plain(bench, count, say) for count in bench.workers}
    return [row for count in bench.workers for row in _rows(bench, count, plain[count], logs, say)]


def _plain(bench: DispatchBench, count: int, say: Callable[[str], None]) -> list[Floor]:
    """Through Ray's graph as its documentation has it, by payload; None where Ray has none."""
    import ray
    from ray.dag import InputNode, MultiOutputNode

    say(f"{count} bare actor{'s' * (count > 1)}")
    actors = [ray.remote(num_cpus=0)(Echo).remote() for _ in range(count)]
    try:
        with InputNode() as payload:
            leaves = MultiOutputNode([actor.take.bind(payload) for actor in actors])
        graph = leaves.experimental_compile(_submit_timeout=60, _buffer_size_bytes=_BUFFER_BYTES)
        # The first call waits for what the actors import.
        ray.get(graph.execute(b""), timeout=_DEADLINE_S)
    except Exception:
        return [(None, None)] * len(bench.payloads)
    try:
        return [_timed_plain(graph, size, bench.calls) for size in bench.payloads]
    finally:
        graph.teardown(kill_actors=True)


def _timed_plain(graph: Any, size: int, calls: int) -> Floor:
    import ray

    array, plain_bytes = np.zeros(size, np.uint8), bytes(size)

    def round_trip() -> float:
        began = time.perf_counter()
        ray.get(graph.execute(array), timeout=_DEADLINE_S)
        return time.perf_counter() - began

    def submission() -> float:
        began = time.perf_counter()
        answers = graph.execute(plain_bytes)
        submitted = time.perf_counter() - began
        ray.get(answers, timeout=_DEADLINE_S)
        return submitted

    return _spread(round_trip, calls), _spread(submission, calls)


def _spread(once: Callable[[], float], calls: int) -> Spread:
    """Of the seconds that each call gives, without the first tenth."""
    taken, end = [], time.perf_counter() + _ROW_S
    for _ in range(calls):
        taken.append(once())
        if time.perf_counter() > end:
            break
    return Spread.of(taken[len(taken) // 10 :])


def _rows(
    bench: DispatchBench, count: int, plain: list[Floor], logs: str, say: Callable[[str], None]
) -> list[DispatchRow]:
    say(f"{count} worker{'s' * (count > 1)}")
    group = WorkerGroup([WorkerSpec(f"echo-{rank}", Echo, log=f"{logs}/echo-{rank}.log") for rank in range(count)], 60)
    try:
        group.built().wait(_DEADLINE_S)
        ordinary = [_timed(group, size, bench.calls) for size in bench.payloads]
        why = ""
        try:
            group.compile(_BUFFER_BYTES)
        except GraphUnavailable as error:
            why = str(error)
        idle = _idle(group)
        rows = []
        for size, spread, floor in zip(bench.payloads, ordinary, plain):
            compiled = None if why else _timed(group, size, bench.calls)
            submit = None if why else _submitted(group, size, bench.calls)
            rows.append(DispatchRow(count, size, spread, compiled, submit, *floor, idle, why))
        return rows
    finally:
        group.kill()


def _timed(group: WorkerGroup, size: int, calls: int) -> Spread:
    payload = np.zeros(size, np.uint8)

    def once() -> float:
        began = time.perf_counter()
        answers = group.call("take", payload)
        taken = time.perf_counter() - began
        if answers != [size] * len(group):
            raise RuntimeError(f"workers received {answers} of {size} bytes")
        return taken

    return _spread(once, calls)


def _submitted(group: WorkerGroup, size: int, calls: int) -> Spread:
    graph, arguments = group.graph, [(np.zeros(size, np.uint8),)] * len(group)
    assert graph is not None

    def once() -> float:
        began = time.perf_counter()
        wait = graph.submit(("take", arguments, {}))
        taken = time.perf_counter() - began
        wait()
        return taken

    return _spread(once, calls)


def _idle(group: WorkerGroup) -> float:
    processes = [psutil.Process(worker.pid()) for worker in group.workers]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(_IDLE_S)
    return max(sum(process.cpu_times()[:2]) - start for process, start in zip(processes, before)) / _IDLE_S
