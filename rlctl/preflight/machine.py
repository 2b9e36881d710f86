"""Cores, memory, disk and GPUs of this machine, as the system and the driver report them, without torch."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rlctl.utils.cores import usable_cores
from rlctl.utils.devices import visible_gpus


@dataclass(frozen=True)
class Gpu:
    """One GPU. memory: bytes in all."""

    name: str
    memory: int


@dataclass(frozen=True)
class Machine:
    """One machine. Sizes are in bytes."""

    python: str
    cores: int
    memory: int
    memory_free: int
    # Size of /dev/shm; 0 without one.
    shm: int
    # In the folder that runs are written to.
    disk_free: int
    gpus: list[Gpu]
    driver: str | None


def read_machine(folder: Path) -> Machine:
    """Return the machine of this process. folder: where runs will be written; its nearest existing parent counts."""
    import psutil

    while not folder.exists():
        folder = folder.parent
    memory = psutil.virtual_memory()
    gpus, driver = _nvidia()
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


def _nvidia() -> tuple[list[Gpu], str | None]:
    """Return the visible GPUs and the driver's version, as nvidia-smi reports them; nothing without it."""
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
