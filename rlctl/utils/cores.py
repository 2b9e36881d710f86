"""Number of CPU cores that this process may use: in containers and jobs fewer than the machine has."""

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = _QUOTA) -> int:
    """Return the cores of the affinity mask (taskset, cpusets, Slurm), limited by the control group's quota.

    quota: a file of cgroup v2 with the CPU time in microseconds, or max, and its period.
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        time_us, period_us = quota.read_text().split()
        return max(1, min(allowed, int(time_us) // int(period_us)))
    except (OSError, ValueError):
        # No such file, or no limit.
        return allowed
