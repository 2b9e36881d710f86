"""`rlctl bench dispatch`: the driver's cost of one call to a group of workers, ordinary against compiled graph."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from rlctl.bench.frame import Bar, Bench, Cells, Chart, Line, Results, ResultTable, Say, plural
from rlctl.launch.local_ray import local_ray
from rlctl.workers.graph import GraphUnavailable
from rlctl.workers.group import WorkerGroup, WorkerSpec

UNITS = {"": 1, "KB": 1 << 10, "MB": 1 << 20}
_DEADLINE_S = 300.0
_BUFFER_BYTES = 1 << 20
_IDLE_S = 2.0
# A row ends after so many seconds, though it has not made all of its calls.
_ROW_S = 10.0
_LEGEND = (
    "round trip of a call that only takes its payload, median and 99th percentile; submit: the part of it before "
    "the driver waits; bare: both through a graph over bare actors, of bytes that Ray only hands on for submit: the "
    "floor; idle: cores that a worker burns while its graph lives and nobody calls it"
)


class Echo:
    """A worker that takes a payload and says how much it got."""

    def take(self, payload: NDArray[np.uint8]) -> int:
        """Return its bytes."""
        return len(payload)


@dataclass(frozen=True)
class Spread:
    """Seconds of the calls of a row."""

    median: float
    p99: float
    calls: int

    def __str__(self) -> str:
        return _time(self.median)


# Round trip and submission through a bare graph, None where there is none.
Floor = tuple[Spread | None, Spread | None]


@dataclass(frozen=True)
class DispatchBench(Bench):
    """Calls to groups of workers, a row for each size of group and payload.

    workers: sizes of the groups. payloads: bytes that every worker gets with a call. calls: of a row, at most.
    """

    workers: Sequence[int]
    payloads: Sequence[int]
    calls: int

    def measure(self, folder: Path, say: Say) -> "DispatchResults":
        """Measure on a Ray of its own: first all floors, then all groups."""
        with local_ray(folder):
            # First of all: once a graph of ours stands, this process reads channels as ours does.
            floors = {count: self._floors(count, say) for count in self.workers}
            return DispatchResults(
                [row for count in self.workers for row in self._rows(count, floors[count], folder, say)]
            )

    def _floors(self, count: int, say: Say) -> list[Floor]:
        """Measure Ray's graph as its documentation has it, by payload."""
        import ray
        from ray.dag import InputNode, MultiOutputNode

        say(plural(count, "bare actor"))
        actors = [ray.remote(num_cpus=0)(Echo).remote() for _ in range(count)]
        try:
            with InputNode() as payload:
                leaves = MultiOutputNode([actor.take.bind(payload) for actor in actors])
            graph = leaves.experimental_compile(_submit_timeout=60, _buffer_size_bytes=_BUFFER_BYTES)
            # The first call waits for what the actors import.
            ray.get(graph.execute(b""), timeout=_DEADLINE_S)
        except Exception:
            return [(None, None)] * len(self.payloads)
        try:
            return [self._floor(graph, size) for size in self.payloads]
        finally:
            graph.teardown(kill_actors=True)

    def _floor(self, graph: Any, size: int) -> Floor:
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

        return self._spread(round_trip), self._spread(submission)

    def _rows(self, count: int, floors: list[Floor], folder: Path, say: Say) -> "list[DispatchRow]":
        say(plural(count, "worker"))
        specs = [WorkerSpec(f"echo-{rank}", Echo, log=f"{folder}/echo-{rank}.log") for rank in range(count)]
        group, why = WorkerGroup(specs, 60), ""
        try:
            group.built().wait(_DEADLINE_S)
            ordinary = [self._round_trips(group, size) for size in self.payloads]
            try:
                group.compile(_BUFFER_BYTES)
            except GraphUnavailable as error:
                why = str(error)
            idle = _idle(group)
            rows = []
            for size, spread, floor in zip(self.payloads, ordinary, floors):
                compiled = None if why else self._round_trips(group, size)
                submit = None if why else self._submissions(group, size)
                rows.append(DispatchRow(count, size, spread, compiled, submit, *floor, idle, why))
            return rows
        finally:
            group.kill()

    def _round_trips(self, group: WorkerGroup, size: int) -> Spread:
        payload = np.zeros(size, np.uint8)

        def once() -> float:
            began = time.perf_counter()
            answers = group.call(Echo.take, payload)
            taken = time.perf_counter() - began
            if answers != [size] * len(group):
                raise RuntimeError(f"workers received {answers} of {size} bytes")
            return taken

        return self._spread(once)

    def _submissions(self, group: WorkerGroup, size: int) -> Spread:
        graph, arguments = group.graph, [(np.zeros(size, np.uint8),)] * len(group)
        assert graph is not None

        def once() -> float:
            began = time.perf_counter()
            wait = graph.submit((Echo.take.__name__, arguments, {}))
            taken = time.perf_counter() - began
            wait()
            return taken

        return self._spread(once)

    def _spread(self, once: Callable[[], float]) -> Spread:
        """Call until a row's calls or its time are used up, leaving out the first tenth. once: returns its seconds."""
        taken, end = [], time.perf_counter() + _ROW_S
        for _ in range(self.calls):
            taken.append(once())
            if time.perf_counter() > end:
                break
        counted = taken[len(taken) // 10 :]
        return Spread(median(counted), float(np.percentile(counted, 99)), len(counted))


def _idle(group: WorkerGroup) -> float:
    processes = [psutil.Process(worker.pid()) for worker in group.workers]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(_IDLE_S)
    return max(sum(process.cpu_times()[:2]) - start for process, start in zip(processes, before)) / _IDLE_S


@dataclass(frozen=True)
class DispatchRow:
    """One size of group and payload, in bytes.

    ordinary, compiled: round trips. submit: the part of a compiled call before the driver waits. plain: through a graph
    over bare actors, which have no thread of their own, copy nothing, and spin while they wait; plain_submit: the same
    part of a call whose payload is bytes, which Ray hands on as they are: the floors. None without a graph; `why` says
    why there is none. idle: cores that the busiest worker burns while nobody calls it.
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
        """Return how much faster the compiled call is, at the median."""
        return None if self.compiled is None else self.ordinary.median / self.compiled.median

    def cells(self) -> Cells:
        """Return the row of the table."""
        return [
            ("workers", str(self.workers)),
            ("payload", _size(self.payload)),
            ("ordinary", str(self.ordinary)),
            ("compiled", str(self.compiled or "")),
            ("p99", _time(self.compiled.p99) if self.compiled else ""),
            ("ratio", "" if self.ratio is None else f"{self.ratio:.1f}x"),
            ("bare", str(self.plain or "")),
            ("submit", str(self.submit or "")),
            ("bare", str(self.plain_submit or "")),
            ("idle", f"{self.idle:.2f}"),
        ]


@dataclass(frozen=True)
class DispatchResults(Results):
    """A row for each size of group and payload."""

    rows: list[DispatchRow]

    def derived(self, row: DispatchRow) -> dict[str, Any]:
        return {"ratio": row.ratio}

    def as_json(self) -> Any:
        """Return the rows alone."""
        return super().as_json()["rows"]

    def report(self, wide: bool) -> list[Line | ResultTable]:
        """Return the table, and why there is no graph where there is none."""
        # Ten columns fit into 80 characters with one space between them.
        table = ResultTable([row.cells() for row in self.rows], gap=1)
        reasons = sorted({row.why for row in self.rows if row.why})
        return [table, *(Line(f"no compiled graph: {why}", "yellow") for why in reasons), Line(_LEGEND, "dim")]

    def chart(self) -> Chart:
        bars = [
            Bar(f"{row.workers} x {row.payload / 1024:,.0f} KB", row.ratio, f"{row.ratio:.1f}x", True)
            for row in self.rows
            if row.ratio is not None
        ]
        label = "ordinary / compiled; dashed: no difference"
        return Chart("Round trip of a call to a group of workers", label, bars, 1.0)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _size(payload: int) -> str:
    name, unit = next((n, u) for n, u in reversed(UNITS.items()) if payload >= u)
    return f"{payload / unit:g} {name or 'B'}"
