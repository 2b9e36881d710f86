"""A run with damaged checkpoints resumes from its newest whole checkpoint. A failed resume leaves the run unchanged."""

import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.faults.runs import Run

SETTINGS = ("sft.num_steps=8", "sft.batch_size=8", "checkpoint.every=2", "checkpoint.keep_last=9", "validation.every=0")
SHARD = "trainer/shard-00001-model-00001-of-00001.safetensors"


def contents(run: Path) -> dict[str, bytes]:
    """Return the contents of a run's files, except logs and events, which record a failed attempt."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in ("events.jsonl", ".driver")]
    names = {path.relative_to(run): path for path in files}
    return {str(name): path.read_bytes() for name, path in names.items() if "logs" not in name.parts}


@pytest.mark.long  # a minute; unit/run/test_damage.py has each damage by itself
@pytest.mark.timeout(900)
def test_a_damaged_run_goes_on_from_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    unhurt = Run(tmp_path, "unhurt", *SETTINGS, kind="sft")
    assert unhurt.end() == 0, unhurt.text()
    hurt = tmp_path / "runs/hurt"
    shutil.copytree(unhurt.path, hurt, symlinks=True)
    with (hurt / "checkpoints/step_8" / SHARD).open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"\xff\xff\xff\xff")
    (hurt / "checkpoints/step_6/state.json").write_text("")
    (hurt / "checkpoints/step_x").mkdir()
    (hurt / "logs/attempt_x").mkdir()
    before = contents(hurt)

    # It fails only once Ray is up, and so would every later resume with this value in its config.
    failed = Run(tmp_path, "hurt", "run.deadline_s=0.001", resume=True, kind="sft")
    assert failed.end() == 1, failed.text()
    assert contents(hurt) == before
    assert yaml.safe_load((hurt / "logs/attempt_2/config.yaml").read_text())["run"]["deadline_s"] == 0.001

    # A compiled graph changes no bit.
    graph = "ray_compiled_graph.enabled=require"
    resumed = Run(tmp_path, "hurt", "checkpoint.keep_last=8", graph, resume=True, kind="sft")
    assert resumed.end() == 0, resumed.text()
    output = resumed.text()
    warnings = [line for line in output.splitlines() if line.startswith("warning ")]
    for path, damage in ((f"step_8/{SHARD}", "its bytes are not"), ("step_6/state.json", "empty, of")):
        warning = next(line for line in warnings if path in line)
        assert damage in warning and warning.endswith("; going on after step 4 instead")
    assert "step_x: no checkpoint of rlctl" in output and "Traceback" not in output
    assert resumed.start() == 4
    assert [step["step"] for step in resumed.steps()] == list(range(1, 9))
    checkpoint = hurt / "checkpoints/step_8"
    unhurt_checkpoint = unhurt.path / "checkpoints/step_8"
    weights = (checkpoint / "hf/model.safetensors").read_bytes()
    assert weights == (unhurt_checkpoint / "hf/model.safetensors").read_bytes()
    # A shard's header is written in any order; its tensors are weights, moments, the number of updates and RNG state.
    tensors = load_file(checkpoint / SHARD)
    unhurt_tensors = load_file(unhurt_checkpoint / SHARD)
    assert tensors.keys() == unhurt_tensors.keys()
    assert [name for name, tensor in tensors.items() if not tensor.equal(unhurt_tensors[name])] == []
    assert yaml.safe_load((hurt / "config.yaml").read_text())["checkpoint"]["keep_last"] == 8
    assert not list((hurt / "checkpoints").glob("damaged_*"))
