"""What this machine has: cores, memory, disk, GPUs. Asked of the system and the driver, never of torch."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rlctl.utils.cores import usable_cores
from rlctl.utils.devices import visible_gpus


@dataclass(frozen=True)
class Gpu:
    """memory: bytes in all."""

    name: str
    memory: int


@dataclass(frozen=True)
class Machine:
    """Bytes throughout. shm: size of /dev/shm, 0 without one. disk_free: of the folder runs are written to."""

    python: str
    cores: int
    memory: int
    memory_free: int
    shm: int
    disk_free: int
    gpus: list[Gpu]
    driver: str | None


def read_machine(folder: Path) -> Machine:
    """The machine this process runs on; `folder`: where runs will be written (its nearest existing parent)."""
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
    """The visible GPUs and the driver's version, as nvidia-smi tells; nothing without it."""
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
    visible = [row for row in rows if any(_is_named(name, row[0], row[1]) for name in names)]
    return [Gpu(row[2], int(row[3]) << 20) for row in visible if row[3].isdigit()], rows[0][4] if rows else None


def _is_named(name: str, index: str, uuid: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES means that device by `name`: its index, or a beginning of its UUID."""
    return name == index if name.isdigit() else uuid.startswith(name)
