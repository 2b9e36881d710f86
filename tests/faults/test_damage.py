"""A run whose checkpoints are damaged goes on from the newest whole one; a resume that fails leaves it as it was."""

import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.faults.runs import Run

SETTINGS = ("sft.num_steps=8", "sft.batch_size=8", "checkpoint.every=2", "checkpoint.keep_last=9", "validation.every=0")
SHARD = "trainer/shard-00001-model-00001-of-00001.safetensors"


def contents(run: Path) -> dict[str, bytes]:
    """The files of a run, without its logs and events, which tell of a failed attempt."""
    files = (path for path in run.rglob("*") if path.is_file() and "logs" not in path.relative_to(run).parts)
    return {
        str(path.relative_to(run)): path.read_bytes() for path in files if path.name not in ("events.jsonl", ".driver")
    }


@pytest.mark.timeout(900)
def test_a_damaged_run_goes_on_from_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    whole = Run(tmp_path, "whole", *SETTINGS, kind="sft")
    assert whole.end() == 0, whole.text()
    hurt = tmp_path / "runs/hurt"
    shutil.copytree(whole.path, hurt, symlinks=True)
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
    shown = resumed.text()
    for path, what in ((f"step_8/{SHARD}", "its bytes are not"), ("step_6/state.json", "empty, of")):
        line = next(line for line in shown.splitlines() if line.startswith("warning ") and path in line)
        assert what in line and line.endswith("; going on after step 4 instead")
    assert "step_x: no checkpoint of rlctl" in shown and "Traceback" not in shown
    assert resumed.start() == 4
    assert [step["step"] for step in resumed.steps()] == list(range(1, 9))
    ours, theirs = (run / "checkpoints/step_8" for run in (hurt, whole.path))
    assert (ours / "hf/model.safetensors").read_bytes() == (theirs / "hf/model.safetensors").read_bytes()
    # A shard's header is written in any order; its tensors are weights, moments, the number of updates and RNG state.
    mine, other = load_file(ours / SHARD), load_file(theirs / SHARD)
    assert mine.keys() == other.keys()
    assert [name for name, tensor in mine.items() if not tensor.equal(other[name])] == []
    assert yaml.safe_load((hurt / "config.yaml").read_text())["checkpoint"]["keep_last"] == 8
    assert not list((hurt / "checkpoints").glob("damaged_*"))
