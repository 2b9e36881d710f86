"""How many CPU cores this process may use, which in containers and jobs are fewer than the machine has."""

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = _QUOTA) -> int:
    """At least 1: those of its affinity (taskset, cpusets, Slurm), at most what its control group's quota is worth.

    quota: a file of cgroup v2: microseconds of CPU time, or max, and the period that they are for.
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        time_us, period_us = quota.read_text().split()
        return max(1, min(allowed, int(time_us) // int(period_us)))
    except (OSError, ValueError):
        # No such file, or no limit.
        return allowed
