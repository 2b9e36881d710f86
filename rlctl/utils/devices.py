"""The GPUs and CPU cores that this process may use, and how busy they are."""

import math
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Gpu:
    """One GPU. memory: total bytes."""

    name: str
    memory: int


def visible_gpus() -> list[str]:
    """Return the NVIDIA devices that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Asks the driver's tool, so that torch need not be imported.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA stops at the first entry that names no device.
        return list(takewhile(lambda name: name not in ("", "-1"), map(str.strip, visible.split(","))))
    tool = shutil.which("nvidia-smi")
    return [str(index) for index in range(_count_installed_gpus(tool) if tool else 0)]


@cache
def _count_installed_gpus(tool: str) -> int:
    # The count is cached: the tool takes up to a second, and every slot of a run asks.
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def count_gpus() -> int:
    """Return the number of NVIDIA devices that this process may use."""
    return len(visible_gpus())


def read_gpus() -> tuple[list[Gpu], str | None]:
    """Return the visible GPUs and the driver's version, as nvidia-smi reports them; nothing without it.

    It takes up to a second.
    """
    if not shutil.which("nvidia-smi"):
        return [], None
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        names = visible_gpus()
    except subprocess.TimeoutExpired:
        return [], None
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 5]
    # CUDA_VISIBLE_DEVICES names a device by its index or by a beginning of its UUID.
    indices = {name for name in names if name.isdigit()}
    uuids = tuple(name for name in names if not name.isdigit())
    visible = [row for row in rows if row[0] in indices or row[1].startswith(uuids)]
    return [Gpu(row[2], int(row[3]) << 20) for row in visible if row[3].isdigit()], rows[0][4] if rows else None


def device_memory() -> int | None:
    """Return the bytes of the smallest GPU that this process may use; None without GPUs."""
    return min((gpu.memory for gpu in read_gpus()[0]), default=None)


def usable_cores(quota: Path = _QUOTA) -> int:
    """Return the number of CPU cores: in containers and jobs fewer than the machine has.

    They are those of the affinity mask (taskset, cpusets, Slurm), limited by the control group's quota.
    quota: a file of cgroup v2 with the CPU time in microseconds, or max, and its period.
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        time_us, period_us = quota.read_text().split()
        return max(1, min(allowed, int(time_us) // int(period_us)))
    except (OSError, ValueError):
        # No such file, or no limit.
        return allowed


def utilization_meter(device: str) -> Callable[[], float]:
    """Return a function that gives the share of use, 0 to 1, since its last call (GPU: over NVML's own last second).

    It gives NaN where the share cannot be read: no run ends for want of this number.
    """
    if device == "cuda":
        return _gpu_meter()
    import psutil

    psutil.cpu_percent(None)
    return lambda: psutil.cpu_percent(None) / 100


def _gpu_meter() -> Callable[[], float]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in visible_gpus()
        ]
    except Exception:  # no NVML, or none of its devices
        handles = []

    def read() -> float:
        try:
            percents = [float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) for handle in handles]
            return sum(percents) / len(percents) / 100
        except Exception:  # no device, a lost one, or one that does not report (a MIG slice)
            return math.nan

    return read
