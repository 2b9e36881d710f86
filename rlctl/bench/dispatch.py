"""`rlctl bench dispatch`: the driver's cost of one call to a group of workers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from rlctl.bench.frame import Bench, Cells, Line, Results, ResultTable, Say
from rlctl.dashboard.formats import count
from rlctl.launch.local_ray import local_ray
from rlctl.workers.compiled_graph import GraphUnavailable
from rlctl.workers.group import WorkerGroup, WorkerSpec

UNITS = {"": 1, "KB": 1 << 10, "MB": 1 << 20}
_DISPATCH_DEADLINE_S = 300.0
_BUFFER_BYTES = 1 << 20
_IDLE_S = 2.0
# A row makes no further call after this time, even if its number of calls is not reached.
_ROW_S = 10.0
_DISPATCH_LEGEND = (
    "ordinary, compiled: round trip of a call that only takes its payload, median; idle: cores that a worker burns "
    "while its graph lives and nobody calls it"
)


class Echo:
    """A worker that returns the size of its payload."""

    def take(self, payload: NDArray[np.uint8]) -> int:
        """Return the number of bytes of the payload."""
        return len(payload)


@dataclass(frozen=True)
class DispatchBench(Bench):
    """Calls to groups of workers, a row for each size of group and payload."""

    workers: Sequence[int]  # sizes of the groups
    payloads: Sequence[int]  # bytes that every worker gets with a call
    calls: int  # the most calls of a row

    def measure(self, folder: Path, say: Say) -> "DispatchResults":
        with local_ray(folder):
            rows = [self._dispatch_rows(size, folder, say) for size in self.workers]
        return DispatchResults(list(chain.from_iterable(rows)))

    def _dispatch_rows(self, workers: int, folder: Path, say: Say) -> "list[DispatchRow]":
        """Measure one group of workers with each payload."""
        say(count(workers, "worker"))
        specs = [WorkerSpec(f"echo-{rank}", Echo, log=f"{folder}/echo-{rank}.log") for rank in range(workers)]
        group = WorkerGroup(specs, 60)
        refusal = ""
        try:
            group.built().wait(_DISPATCH_DEADLINE_S)
            ordinary = [self._measure_call(group, size) for size in self.payloads]
            # From here on calls go through the graph, if there can be one.
            try:
                group.compile(_BUFFER_BYTES)
            except GraphUnavailable as error:
                refusal = str(error)
            idle = _measure_idle(group)
            rows = []
            for size, ordinary_s in zip(self.payloads, ordinary):
                rows.append(
                    DispatchRow(
                        workers=workers,
                        payload=size,
                        ordinary=ordinary_s,
                        compiled=None if refusal else self._measure_call(group, size),
                        idle=idle,
                        why=refusal,
                    )
                )
            return rows
        finally:
            group.kill()

    def _measure_call(self, group: WorkerGroup, size: int) -> float:
        """Return the median seconds of a call with a payload of `size` bytes. The first tenth of the calls is left out.

        Make `self.calls` calls, or as many as fit into 10 s. Raises RuntimeError if a worker received another size.
        """
        payload = np.zeros(size, np.uint8)
        seconds = []
        end = time.perf_counter() + _ROW_S
        for _ in range(self.calls):
            began = time.perf_counter()
            answers = group.call(Echo.take, payload)
            seconds.append(time.perf_counter() - began)
            if answers != [size] * len(group):
                raise RuntimeError(f"workers received {answers} of {size} bytes")
            if time.perf_counter() > end:
                break
        return median(seconds[len(seconds) // 10 :])


def _measure_idle(group: WorkerGroup) -> float:
    """Return the number of cores that the busiest worker uses while nobody calls it, over 2 s."""
    processes = [psutil.Process(worker.pid()) for worker in group.workers]
    # CPU seconds in user and in system mode.
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(_IDLE_S)
    seconds = [sum(process.cpu_times()[:2]) - start for process, start in zip(processes, before)]
    return max(seconds) / _IDLE_S


@dataclass(frozen=True)
class DispatchRow:
    """Measurements for one size of group and of payload."""

    workers: int
    payload: int  # bytes
    ordinary: float  # median seconds of a round trip by ordinary calls
    compiled: float | None  # the same through a compiled graph; None if there could be no graph
    idle: float  # cores that the busiest worker uses between calls
    why: str  # reason why there is no compiled graph; "" if there is one

    @property
    def ratio(self) -> float | None:
        """Median time of an ordinary call divided by that of a call through the compiled graph."""
        return None if self.compiled is None else self.ordinary / self.compiled

    def cells(self) -> Cells:
        """Return the cells of its table row."""
        return [
            ("workers", str(self.workers)),
            ("payload", _size(self.payload)),
            ("ordinary", _time(self.ordinary)),
            ("compiled", _time(self.compiled) if self.compiled else ""),
            ("ratio", "" if self.ratio is None else f"{self.ratio:.1f}x"),
            ("idle", f"{self.idle:.2f}"),
        ]


@dataclass(frozen=True)
class DispatchResults(Results):
    """Results: a row for each size of group and of payload."""

    rows: list[DispatchRow]

    def derived_figures(self, row: DispatchRow) -> dict[str, Any]:
        return {"ratio": row.ratio}

    def report(self, wide: bool) -> list[Line | ResultTable]:
        table = ResultTable([row.cells() for row in self.rows])
        reasons = sorted({row.why for row in self.rows if row.why})
        warnings = (Line(f"no compiled graph: {reason}", "yellow") for reason in reasons)
        return [table, *warnings, Line(_DISPATCH_LEGEND, "dim")]


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _size(payload: int) -> str:
    name, unit = next((name, unit) for name, unit in reversed(UNITS.items()) if payload >= unit)
    return f"{payload / unit:g} {name or 'B'}"
