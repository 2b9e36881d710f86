"""The examples train: as many together as one recipe holds, and each by its page's commands."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

import rlctl
from rlctl.config.builtin import EXAMPLES
from tests.faults.runs import WITHOUT_VLLM, Run
from tests.system.clusters import Clusters

TOGETHER = ("reward", "loss", "advantage", "tracker", "rollout-function")


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the current directory an empty folder. `rlctl` and `python` of a script are this installation's."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, arguments in (("rlctl", "-m rlctl.cli.main"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add_keys(config: dict[str, Any], keys: dict[str, Any]) -> None:
    """Put the keys of a recipe over a config, as a later file of `defaults` does."""
    for key, value in keys.items():
        if isinstance(value, dict):
            add_keys(config.setdefault(key, {}), value)
        else:
            config[key] = value


def copy_example(name: str, folder: Path) -> Path:
    """Copy an example and return its folder."""
    done = subprocess.run(["rlctl", "examples", "copy", name], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"cd {name}\n")
    return folder / name


def run_commands(folder: Path) -> str:
    """Run the commands of an example's page in its folder, and return their output."""
    commands = (folder / "README.md").read_text().split("```")[1]
    done = subprocess.run(["bash", "-euc", commands], cwd=folder, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_five_examples_train_in_one_recipe(tmp_path: Path) -> None:
    recipe: dict[str, Any] = {}
    for name in TOGETHER:
        shutil.copytree(EXAMPLES / name, tmp_path, dirs_exist_ok=True)
        keys = yaml.safe_load((EXAMPLES / name / "recipe.yaml").read_text())
        # The rollout function needs no reward; here it has some.
        add_keys(recipe, {key: value for key, value in keys.items() if value != []})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    settings = ("grpo.num_steps=2", "grpo.updates_per_step=2", "validation.max_prompts=8")
    run = Run(tmp_path, "together", "recipe.yaml", WITHOUT_VLLM, *settings)
    assert run.end() == 0, run.text()
    assert [step["version"] for step in run.steps()] == [1, 2]
    for step in run.steps():
        assert {"reward/exact/mean", "reward/near/mean", "reward/environment/mean"} <= step.keys()
        assert step["reward/failed"] == 0 and step["environment/failed"] == 0
    assert [event["what"] for event in run.events() if event["kind"] == "warning" and "missed" in event["what"]] == []
    config = rlctl.load_run(run.path).config
    assert config["grpo"]["loss"]["name"].endswith("topr.py:Topr")
    assert config["grpo"]["advantage"]["name"].endswith("focal.py:Focal")
    connection = sqlite3.connect(run.path / "sums.sqlite")
    steps = connection.execute("select distinct step from metrics where kind = 'step' order by step").fetchall()
    assert steps == [(1,), (2,)]
    assert connection.execute("select count(*) from rollouts where purpose = 'train'").fetchone()[0] > 0


@pytest.mark.long  # a whole run each: a minute or more
@pytest.mark.parametrize(
    "name",
    [
        "reward",
        "judge",
        "environment",
        "agent",
        "loss",
        "advantage",
        "teacher",
        "critic",
        "rollout-function",
        "tracker",
    ],
)
def test_a_part_of_ones_own_trains(tmp_path: Path, name: str) -> None:
    folder = copy_example(name, tmp_path)
    run_commands(folder)
    (path,) = (folder / "runs").glob("*/events.jsonl")
    run = rlctl.load_run(path.parent)
    assert run.status == "done" and len(run.metrics) == run.config["grpo"]["num_steps"]
    rewards = run.metrics.column("reward/mean")
    accuracies = run.validations.column("validation/accuracy")
    print(f"{name}: reward {rewards[0]:.3f} to {rewards[-1]:.3f}, accuracies {accuracies}")
    assert sum(rewards[-5:]) > sum(rewards[:5])


@pytest.mark.long  # an engine, and a run
def test_a_model_is_checked_and_trains(tmp_path: Path) -> None:
    folder = copy_example("model", tmp_path)
    assert "FAILS" not in run_commands(folder)
    (path,) = (folder / "runs").glob("*/events.jsonl")
    losses = rlctl.load_run(path.parent).validations.column("validation/loss")
    print("loss", losses)
    assert losses[-1] < losses[0]


@pytest.mark.long  # two runs and two evaluations
def test_a_script_leads_from_random_weights_to_an_export(tmp_path: Path) -> None:
    folder = copy_example("sft-to-export", tmp_path)
    done = subprocess.run(["bash", "run.sh"], cwd=folder, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "more than chance" in done.stdout and "no more than chance" not in done.stdout
    assert json.loads((folder / "sums-hf/config.json").read_text())["model_type"] == "qwen3"
    assert (folder / "sums-hf/README.md").is_file()


@pytest.mark.long  # three runs
def test_a_sweep_says_which_rate_is_best(tmp_path: Path) -> None:
    folder = copy_example("sweep", tmp_path)
    done = subprocess.run(["python", "sweep.py"], cwd=folder, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["lr-0.0001", "lr-0.0003", "lr-0.001", "best"]


@pytest.mark.long  # a run and an evaluation
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    folder = copy_example("notebook", tmp_path)
    notebook = nbformat.read(folder / "sums.ipynb", as_version=4)
    NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(folder)}}).execute()
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            texts.append(output.get("text") or output["data"]["text/plain"])
    print(*texts, sep="\n")
    assert "<run grpo--qwen3-tiny--1: done, 40 steps>" in texts


@pytest.mark.long  # a cluster, and a run on it
@pytest.mark.usefixtures("ordinary_workers")
def test_a_run_over_two_nodes(clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - clusters.environment.keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", clusters.environment["XDG_STATE_HOME"])
    folder = copy_example("two-nodes", tmp_path)
    run_commands(folder)
    (path,) = (folder / "runs").glob("*/events.jsonl")
    run = rlctl.load_run(path.parent)
    assert run.status == "done" and len(run.metrics) == 20
    (attempt,) = (run.path / "logs").glob("attempt_*")
    nodes = json.loads((attempt / "nodes.json").read_text())
    assert len(set(nodes.values())) == 2
