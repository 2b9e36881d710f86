"""A run or a checkpoint is a model wherever a config names one, by its name, its directory, or its folder."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.config.errors import ConfigError
from rlctl.evaluation.target import find_target
from rlctl.preflight.load import Composed, load
from rlctl.run.checkpoints import Checkpoints
from tests.unit import folders


@pytest.fixture
def run(home: Path) -> Path:
    """Make a run `sums` with checkpoints of steps 2 and 10, which have the weights of `home`'s model."""
    folder = home / "runs/sums"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("kind: grpo\n")
    for step in (2, 10):
        save_checkpoint(folder, step, export=True)
    return folder


def save_checkpoint(run: Path, step: int, export: bool) -> None:
    def write(path: Path) -> None:
        if export:
            shutil.copytree(run.parents[1] / "model", path / "hf")

    Checkpoints(run / "checkpoints", 9, 0).save(step, {}, write)


def load_with_model(model: str, *overrides: str) -> Composed:
    return load("grpo", "grpo.recipe.yaml", [f"model.path={model}", *overrides])


@pytest.mark.parametrize(
    ("model", "step"),
    [
        ("sums", 10),
        ("runs/sums", 10),
        ("runs/sums/checkpoints/step_2", 2),
        ("sums/checkpoints/step_2", 2),
        ("runs/sums/checkpoints/step_2/hf", 2),
    ],
)
def test_every_way_to_name_them_gives_the_weights_that_an_evaluation_takes(run: Path, model: str, step: int) -> None:
    weights = load_with_model(model).config.model.path
    assert weights == str(run / f"checkpoints/step_{step}/hf")
    assert Path(find_target(model, Path("runs")).model).resolve() == Path(weights)


def test_a_run_in_another_folder_is_found_by_run_dir(run: Path, home: Path) -> None:
    run.parent.rename(home / "elsewhere")
    weights = load_with_model("sums", "run.dir=elsewhere").config.model.path
    assert weights == str(home / "elsewhere/sums/checkpoints/step_10/hf")


def test_a_recipe_may_name_a_run_and_the_run_keeps_the_checkpoint(run: Path, home: Path) -> None:
    (home / "next.yaml").write_text("defaults: grpo.recipe.yaml\nmodel: {path: sums}\n")
    composed = load("grpo", "next.yaml", [])
    weights = "runs/sums/checkpoints/step_10/hf"
    assert composed.notes[0] == f"model.path=sums is {weights}"
    assert f"path: {home / weights}" in composed.to_yaml()
    assert not load_with_model(weights).notes


def test_a_model_folder_of_that_name_comes_first(run: Path, home: Path) -> None:
    shutil.copytree(home / "model", home / "sums")
    assert load_with_model("sums").config.model.path == str(home / "sums")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("sum", "no file or folder sum; did you mean sums?"),
        ("begun", "is a run without a checkpoint: it has no weights yet"),
        ("bare", "step_1 has no hf/ folder: its run had checkpoint.export=false"),
    ],
)
def test_what_has_no_weights_is_said_in_one_line(run: Path, model: str, expected: str) -> None:
    for name in ("begun", "bare"):
        (run.parent / name).mkdir()
        (run.parent / name / "events.jsonl").write_text(json.dumps({"kind": "run_started"}) + "\n")
    save_checkpoint(run.parent / "bare", 1, export=False)
    with pytest.raises(ConfigError) as caught:
        load_with_model(model)
    [problem] = caught.value.problems
    assert problem.key == "model.path" and problem.what.endswith(expected)


def test_a_run_does_not_start_from_weights_that_are_not_as_they_were_written(run: Path) -> None:
    file = run / "checkpoints/step_10/hf/model.safetensors"
    file.write_bytes(folders.weights("other"))
    command = [sys.executable, "-m", "rlctl", "train", "grpo", "grpo.recipe.yaml", "model.path=sums"]
    process = subprocess.run([*command, "run.name=next"], capture_output=True, text=True, check=False)
    assert process.returncode == 2
    problem = f"model.path: {file}: its bytes are not those that were written; name another checkpoint"
    assert problem in " ".join(process.stdout.split())
