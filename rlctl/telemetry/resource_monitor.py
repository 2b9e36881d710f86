"""Memory and device use of a run. They are measured at most every 5 seconds, so that fast steps stay fast."""

import math
import time
from collections.abc import Callable

from rlctl.telemetry.metrics import IN_GRPO, SPEED, Metric, ReportChart, rows_where
from rlctl.utils.devices import utilization_meter

MEMORY = ReportChart(SPEED, "Memory, GiB", 80)
# ruff must not split the rows of this table over more lines.
# fmt: off
UTILIZATION = Metric("device/utilization", "share of the devices in use", "share",
    chart=ReportChart(SPEED, "Devices in use", 50))
METRICS = rows_where(
    IN_GRPO,
    Metric("memory/trainer_gib", "peak memory of a trainer rank, GiB", chart=MEMORY),
    Metric("memory/engine_gib", "memory of an engine, GiB", chart=MEMORY),
    Metric("memory/driver_gib", "memory of the driver, GiB", chart=MEMORY),
    UTILIZATION,
)
# fmt: on

GIB = float(2**30)
EVERY_S = 5.0

# Returns the memory of each process of a kind (trainer ranks, engines), in bytes: device_peak and host_rss.
Ask = Callable[[], list[dict[str, float]]]


class ResourceMonitor:
    """Source of the metrics memory/*_gib and device/utilization.

    memory/NAME_gib is the largest peak device memory of a process of this kind. On a CPU it is the resident memory.
    """

    def __init__(self, device: str, sources: dict[str, Ask], now: Callable[[], float] = time.monotonic) -> None:
        self._sources = sources
        self._now = now
        self._utilization = utilization_meter(device)
        # Time of the next measurement.
        self._next = now()

    def read(self) -> dict[str, float]:
        """Measure and return the metrics by name; an empty dict if the last measurement is less than 5 s old."""
        if self._now() < self._next:
            return {}
        self._next = self._now() + EVERY_S
        import psutil

        metrics = dict[str, float]()
        for name, ask in self._sources.items():
            sizes = [memory["device_peak"] or memory["host_rss"] for memory in ask()]
            metrics[f"memory/{name}_gib"] = max(sizes, default=0.0) / GIB
        metrics["memory/driver_gib"] = psutil.Process().memory_info().rss / GIB
        used = self._utilization()
        return metrics if math.isnan(used) else metrics | {UTILIZATION.name: used}
