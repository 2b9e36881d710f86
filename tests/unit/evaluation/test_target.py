"""The weights that a text names: of a run, a checkpoint, its hf/ folder, another folder, the hub."""

import json
import os
from pathlib import Path

import pytest

from rlctl.config import run_weights
from rlctl.config.run_weights import exported_weights
from rlctl.evaluation.target import Target, TargetError, digest_of_weights, find_target
from rlctl.run.checkpoints import Checkpoints


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with checkpoints of steps 2 and 4."""
    folder = tmp_path / "runs/sums"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("kind: grpo\n")

    def write(path: Path) -> None:
        (path / "hf").mkdir()
        (path / "hf/config.json").write_text("{}")
        (path / "hf/model.safetensors").write_text(path.name)

    for step in (2, 4):
        Checkpoints(folder / "checkpoints", 9, 0).save(step, {}, write)
    return folder


def test_a_run_is_its_newest_checkpoint_or_that_of_a_step(run: Path) -> None:
    newest = Target(str(run / "checkpoints/step_4/hf"), 4, run)
    assert find_target("sums", run.parent) == find_target(str(run), Path("/")) == newest
    assert newest.name == "sums step 4"
    assert find_target("sums", run.parent, 2).step == 2
    with pytest.raises(TargetError, match="has no checkpoint of step 3; there are 2, 4"):
        find_target("sums", run.parent, 3)


def test_a_checkpoint_and_its_hf_folder_know_their_step_and_run(run: Path) -> None:
    for text in (run / "checkpoints/step_2", run / "checkpoints/step_2/hf"):
        assert find_target(str(text), Path("/")) == Target(str(run / "checkpoints/step_2/hf"), 2, run)


def test_a_file_that_is_not_as_it_was_written_is_named(run: Path) -> None:
    file = run / "checkpoints/step_4/hf/model.safetensors"
    file.write_text("step_other")
    with pytest.raises(TargetError, match=f"{file}: its bytes are not those that were written"):
        find_target("sums", run.parent)


@pytest.mark.parametrize("damage", ["cut", "edited", "missing", "config", "set aside"])
def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_is_taken_by_name_alone(run: Path, damage: str) -> None:
    newest = run / "checkpoints/step_4"
    previous = run / "checkpoints/step_2"
    state = newest / "state.json"
    if damage == "cut":
        state.write_text(state.read_text()[:5])
    elif damage == "edited":
        state.write_text(state.read_text() + " ")
    elif damage == "missing":
        state.unlink()
    elif damage == "config":
        (newest / "hf/config.json").unlink()
    else:
        newest = Checkpoints(run / "checkpoints", 9, 0).set_aside(newest)
    for arguments in (("sums", run.parent), (str(run), Path("/"))):
        with pytest.raises(TargetError) as raised:
            find_target(*arguments)
        problem = str(raised.value)
        assert problem.startswith(str(newest)) and problem.endswith(f"; the one before: --step 2, or {previous}")
    assert find_target("sums", run.parent, 2).step == find_target(str(previous), Path("/")).step == 2
    if damage in ("cut", "missing", "set aside"):
        with pytest.raises(FileNotFoundError, match=f"{newest}, the newest checkpoint, is damaged; the one before: "):
            exported_weights(run)


def test_a_checkpoint_that_was_set_aside_counts_until_another_is_saved(run: Path) -> None:
    checkpoints = Checkpoints(run / "checkpoints", 9, 0)
    aside = checkpoints.set_aside(run / "checkpoints/step_4")
    with pytest.raises(FileNotFoundError, match="damaged_step_4, the newest checkpoint, is damaged"):
        exported_weights(run)
    os.utime(aside, (0, 0))
    os.utime(run / "checkpoints/step_2/state.json", (1, 1))
    assert find_target("sums", run.parent).step == 2
    assert exported_weights(run) == run / "checkpoints/step_2/hf"


def test_a_checkpoint_that_is_pruned_before_it_is_read_is_not_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save step 6 of a training run after its checkpoints were listed and before the chosen one is read."""
    real = run_weights.newest_folder

    def look(checkpoints: Path) -> tuple[int, Path] | None:
        newest = real(checkpoints)
        if newest and newest[0] == 4:
            (run / "checkpoints/step_4").rename(run / "checkpoints/step_6")
            (run / "checkpoints/step_6/state.json").write_text('{"step": 6}')
        return newest

    monkeypatch.setattr(run_weights, "newest_folder", look)
    assert exported_weights(run) == run / "checkpoints/step_6/hf"


def test_a_run_whose_only_checkpoint_is_damaged_names_it(run: Path) -> None:
    for step in (2, 4):
        (run / f"checkpoints/step_{step}/state.json").write_text("{")
    with pytest.raises(TargetError, match=r"step_4/state\.json: cut to 1 of \d+ bytes$"):
        find_target("sums", run.parent)


def test_a_checkpoint_without_an_export_says_so(run: Path) -> None:
    Checkpoints(run / "checkpoints", 9, 0).save(6, {}, lambda path: None)
    with pytest.raises(TargetError, match=r"step_6 has no hf/ folder: its run had checkpoint.export=false"):
        find_target("sums", run.parent)


def test_other_folders_and_hub_names_belong_to_no_run(tmp_path: Path, run: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(TargetError, match=r"model has a config.json, but no weights: .* model.random_init=true makes"):
        find_target(str(folder), run.parent)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert find_target(str(folder), run.parent) == Target(str(folder))
    assert find_target("Qwen/Qwen3-0.6B", run.parent).name == "Qwen3-0.6B"
    with pytest.raises(TargetError, match=r"sum: no run, no checkpoint, and no folder .*; did you mean sums"):
        find_target("sum", run.parent)
    with pytest.raises(TargetError, match=r"--step 2: .* is one set of weights"):
        find_target(str(folder), run.parent, 2)


def test_other_weights_have_another_digest_wherever_they_are(run: Path, tmp_path: Path) -> None:
    second = run / "checkpoints/step_2/hf"
    assert digest_of_weights(second) != digest_of_weights(run / "checkpoints/step_4/hf")
    manifest = json.loads((second.parent / "manifest.json").read_text())
    assert set(manifest["files"]) >= {"hf/model.safetensors"}
    before = digest_of_weights(second)
    run.rename(tmp_path / "moved")
    assert digest_of_weights(tmp_path / "moved/checkpoints/step_2/hf") == before
