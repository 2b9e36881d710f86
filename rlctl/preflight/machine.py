"""Cores, memory, disk and GPUs of this machine, as the system and the driver report them, without torch."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlctl.utils.devices import Gpu, read_gpus, usable_cores

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class RunMachine:
    """Devices for which a run is settled."""

    # None: not known yet.
    device: Device | None = None
    # Bytes of the smallest device; None: not known.
    memory: int | None = None
    # Number of trainer ranks on each node that has any; empty: not known yet.
    ranks_by_node: tuple[int, ...] = ()


@dataclass(frozen=True)
class Machine:
    """One machine. Sizes are in bytes."""

    python: str
    cores: int
    memory: int
    memory_free: int
    # Size of /dev/shm; 0 without one.
    shm: int
    # Free bytes on the disk of the folder where runs are written.
    disk_free: int
    gpus: list[Gpu]
    driver: str | None


def read_machine(folder: Path) -> Machine:
    """Return the machine of this process. folder: where runs will be written; if it does not exist, its nearest parent
    counts.
    """
    import psutil

    while not folder.exists():
        folder = folder.parent
    memory = psutil.virtual_memory()
    gpus, driver = read_gpus()
    return Machine(
        python=".".join(map(str, sys.version_info[:3])),
        cores=usable_cores(),
        memory=memory.total,
        memory_free=memory.available,
        shm=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        disk_free=shutil.disk_usage(folder).free,
        gpus=gpus,
        driver=driver,
    )


def device_of(gpus: int) -> Device:
    """Return the kind of device of a machine or cluster with `gpus` GPUs."""
    return "cuda" if gpus else "cpu"
