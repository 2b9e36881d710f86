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
    """One GPU."""

    name: str
    memory: int  # total bytes


def visible_gpus() -> list[str]:
    """Return the names of the NVIDIA devices that this process may use, in the form of CUDA_VISIBLE_DEVICES.

    Without that variable, nvidia-smi lists the devices, so that torch is not imported.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA ignores all entries from the first one on that names no device.
        return list(takewhile(lambda name: name not in ("", "-1"), map(str.strip, visible.split(","))))
    tool = shutil.which("nvidia-smi")
    return [str(index) for index in range(_count_installed_gpus(tool) if tool else 0)]


@cache
def _count_installed_gpus(tool: str) -> int:
    # Cached, because nvidia-smi takes up to a second, and a run asks for every process that it places.
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def count_gpus() -> int:
    """Return the number of NVIDIA devices that this process may use."""
    return len(visible_gpus())


def read_gpus() -> tuple[list[Gpu], str | None]:
    """Return the GPUs that this process may use, and the driver's version. Without nvidia-smi return ([], None).

    nvidia-smi takes up to a second.
    """
    if not shutil.which("nvidia-smi"):
        return [], None
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        names = visible_gpus()
    except subprocess.TimeoutExpired:
        return [], None
    # CUDA_VISIBLE_DEVICES names a device by its index, or by the first characters of its UUID.
    indices = {name for name in names if name.isdigit()}
    uuids = tuple(name for name in names if not name.isdigit())
    gpus = []
    driver_version = None
    for line in answer.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        # Other lines are messages of nvidia-smi.
        if len(cells) != 5:
            continue
        index, uuid, name, memory_mib, driver = cells
        driver_version = driver_version or driver
        # A device may report no memory.
        if (index in indices or uuid.startswith(uuids)) and memory_mib.isdigit():
            gpus.append(Gpu(name, int(memory_mib) << 20))
    return gpus, driver_version


def device_memory() -> int | None:
    """Return the bytes of the smallest GPU that this process may use; None without GPUs."""
    return min((gpu.memory for gpu in read_gpus()[0]), default=None)


def usable_cores(quota: Path = _QUOTA) -> int:
    """Return the number of CPU cores that this process may use. In containers and jobs the machine has more.

    The affinity mask (taskset, cpusets, Slurm) counts, and the CPU quota of the control group. quota: cgroup v2's
    cpu.max, a file with two words: microseconds of CPU time (or max) in each period, and the period in microseconds.
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        time_us, period_us = quota.read_text().split()
        return max(1, min(allowed, int(time_us) // int(period_us)))
    except (OSError, ValueError):
        # The file does not exist, or says max.
        return allowed


def utilization_meter(device: str) -> Callable[[], float]:
    """Return a function that returns the share (0 to 1) in which the devices were used.

    On a CPU the share is of all cores since the last call. On GPUs it is the mean over devices in NVML's last second.
    The function returns NaN if the share cannot be read.
    """
    if device == "cuda":
        return _gpu_meter()
    import psutil

    psutil.cpu_percent(None)
    return lambda: psutil.cpu_percent(None) / 100


def _gpu_meter() -> Callable[[], float]:
    """Return the function of `utilization_meter` for GPUs."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in visible_gpus()
        ]
    except Exception:  # there is no NVML, or it does not know the devices
        handles = []

    def read() -> float:
        try:
            percents = [float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) for handle in handles]
            return sum(percents) / len(percents) / 100
        except Exception:  # there is no device, one is lost, or one does not report, like a MIG slice
            return math.nan

    return read
