"""A full disk ends a run with one line that names the folder. Checkpoints stay whole, and a resume works with room."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rlctl.evaluation.export import export
from rlctl.evaluation.target import Target
from rlctl.launch.session import run_session
from rlctl.preflight.load import load
from tests.faults.runs import Run

MIB = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 20 MiB, which has room for two checkpoints of the tiny model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small file system is not permitted: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_an_export_of_an_adapter_and_a_resume_name_the_file_that_has_no_room(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": "x", "target_modules": ["a"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").write_bytes(b"\0" * 24 * MIB)
    with pytest.raises(OSError, match="No space left on device") as error:
        export(Target(str(adapter)), small_disk / "out", None, print)
    # The command line prints the error as one line.
    assert error.value.filename == str(small_disk / "out") and not list(small_disk.iterdir())

    composed = load("grpo", None, [f"run.dir={small_disk}", "run.name=full", "telemetry.dashboard=off"])
    assert run_session(composed.settled, composed.to_yaml(), None, lambda session: None) == 0
    with (small_disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    capsys.readouterr()
    run = small_disk / "full"
    assert run_session(composed.settled, composed.to_yaml(), run, lambda session: None) == 1
    message = f"{run}/logs/attempt_2/config.yaml: No space left on device; make room there, then resume"
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.long  # two runs; the parts: tests/unit/run/test_checkpoints.py and test_recorder.py
def test_a_full_disk_costs_the_checkpoint_not_the_earlier_ones(small_disk: Path) -> None:
    settings = ("grpo.num_steps=4", "checkpoint.every=2", "telemetry.groups_per_step=0", "run.probe=false")
    run = Run(small_disk, "full", *settings)
    run.wait_for_event("checkpoint", step=2)
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        room = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        file.write(b"\0" * (room - MIB))
    assert run.end() == 1
    errors = [event["what"] for event in run.events("error")]
    assert len(errors) == 1
    assert "No space left on device" in errors[0]
    assert str(run.path) in errors[0]
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step_2"]

    ballast.unlink()
    resumed = Run(small_disk, "full", resume=True)
    assert resumed.end() == 0, resumed.text()
    assert [record["step"] for record in resumed.steps()] == [1, 2, 3, 4]
