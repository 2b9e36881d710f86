"""The disk fills up: one line that names the folder, earlier checkpoints whole, and a resume once there is room."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.runs import Run

MIB = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MiB: room for two checkpoints of the tiny model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small file system is not permitted: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.long  # two runs; the parts: tests/unit/run/test_checkpoints.py and test_recorder.py
@pytest.mark.slow
def test_a_full_disk_costs_the_checkpoint_not_the_earlier_ones(small_disk: Path) -> None:
    settings = ("grpo.num_steps=4", "checkpoint.every=2", "telemetry.groups_per_step=0", "run.probe=false")
    run = Run(small_disk, "full", *settings)
    run.wait_for_event("checkpoint", step=2)
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        room = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        file.write(b"\0" * (room - MIB))
    assert run.end() == 1
    errors = [event["what"] for event in run.events() if event["kind"] == "error"]
    assert len(errors) == 1
    assert "No space left on device" in errors[0]
    assert str(run.path) in errors[0]
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step_2"]

    ballast.unlink()
    resumed = Run(small_disk, "full", resume=True)
    assert resumed.end() == 0, resumed.text()
    assert [record["step"] for record in resumed.steps()] == [1, 2, 3, 4]
