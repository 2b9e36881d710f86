"""Memory and device use of a run, read every few seconds at most, so that fast steps stay fast."""

import math
import time
from collections.abc import Callable

from rlctl.telemetry.metrics import IN_GRPO, SPEED, Metric, ReportChart, rows_where
from rlctl.utils.devices import utilization_meter

_MEMORY = ReportChart(SPEED, "Memory, GiB", 80)
# A table: each row fills its lines.
# fmt: off
UTILIZATION = Metric("device/utilization", "share of the devices in use", "share",
    chart=ReportChart(SPEED, "Devices in use", 50))
METRICS = rows_where(
    IN_GRPO,
    Metric("memory/trainer_gib", "peak memory of a trainer rank, GiB", chart=_MEMORY),
    Metric("memory/engine_gib", "memory of an engine, GiB", chart=_MEMORY),
    Metric("memory/driver_gib", "memory of the driver, GiB", chart=_MEMORY),
    UTILIZATION,
)
# fmt: on

GIB = float(2**30)
EVERY_S = 5.0

Ask = Callable[[], list[dict[str, float]]]


class ResourceMonitor:
    """Source of memory/*_gib: the largest process's peak device memory, on a CPU its resident memory."""

    def __init__(self, device: str, sources: dict[str, Ask], now: Callable[[], float] = time.monotonic) -> None:
        self._sources = sources
        self._now = now
        self._utilization = utilization_meter(device)
        self._next = now()

    def read(self) -> dict[str, float]:
        """Read the metrics; none less than `EVERY_S` seconds after the last reading."""
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
