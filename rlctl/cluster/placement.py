"""Which device each trainer rank and engine stands on. Pure: devices in, a `Placement` or one clear error out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """device: "cpu" or "cuda". trainers[r]: device index of rank r; engines[e]: device indices of engine e.

    On CPU the indices are empty and everything shares the cores. shared: engines and trainers share devices and
    take turns.
    """

    device: str
    trainers: list[list[int]]
    engines: list[list[int]]
    shared: bool

    @property
    def trainer_devices(self) -> int:
        """Devices that train (CPU: one machine counts as one device)."""
        return max(1, len({index for rank in self.trainers for index in rank}))

    @property
    def generator_devices(self) -> int:
        """Devices that generate."""
        return max(1, len({index for engine in self.engines for index in engine}))

    @property
    def all_devices(self) -> int:
        """Distinct devices in use."""
        return max(1, len({index for part in (*self.trainers, *self.engines) for index in part}))


def place(gpus: int, ranks: int, engines: int, tensor_parallel_size: int, colocated: bool) -> Placement:
    """Ranks take devices from 0 on; engines the same ones (colocated) or those after them.

    Raises ValueError with the arithmetic when there are too few devices.
    """
    if gpus == 0:
        return Placement("cpu", [[]] * ranks, [[]] * engines, shared=True)
    wanted = engines * tensor_parallel_size
    needed = max(ranks, wanted) if colocated else ranks + wanted
    if needed > gpus:
        how = "shared by" if colocated else "apart for"
        raise ValueError(
            f"{needed} GPUs needed, {how} {ranks} trainer ranks and {engines} engines x "
            f"{tensor_parallel_size} (tensor_parallel_size); this machine has {gpus}"
        )
    first = 0 if colocated else ranks
    groups = [
        list(range(first + e * tensor_parallel_size, first + (e + 1) * tensor_parallel_size)) for e in range(engines)
    ]
    return Placement("cuda", [[rank] for rank in range(ranks)], groups, shared=colocated)


def count_gpus() -> int:
    """NVIDIA devices that this process may use; asks the driver's tool, so that torch need not be imported."""
    import os
    import shutil
    import subprocess

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
