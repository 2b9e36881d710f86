"""The commands proposed at a run's end: they work in the run's directory, one on each line, and the resume is last."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.run_weights import ADAPTER_CONFIG
from rlctl.launch.next_steps import next_commands
from rlctl.preflight.load import load
from rlctl.preflight.placement import NodeResources, requested_resources, smaller_runs
from rlctl.run.checkpoints import Checkpoints
from rlctl.run.run_dir import JobRecord, RunDir
from rlctl.telemetry.jsonl import JsonlWriter


def write_run(folder: Path, *overrides: str, kind: str = "grpo", has_export: bool = True) -> tuple[Any, RunDir]:
    """Write a run whose 4 steps are done, with a checkpoint. Return its settled config too."""
    settled = load(kind, None, [f"{kind}.num_steps=4", *overrides]).settled
    run = RunDir.create("sums", folder)
    JsonlWriter(run.metrics).write({"kind": "step", "step": 4})

    def write_checkpoint(path: Path) -> None:
        if has_export:
            (path / "hf").mkdir()

    Checkpoints(run.checkpoints, 1, 0).save(4, {}, write_checkpoint)
    return settled, run


def test_a_grpo_run_names_its_weights_and_how_to_measure_and_export_them(tmp_path: Path) -> None:
    settled, run = write_run(tmp_path)
    assert next_commands(settled, run, "done") == [
        f"rlctl runs dash {run.path}",
        f"rlctl eval {run.path}",
        f"rlctl export {run.path} sums-hf",
        f"vllm serve {run.path}/checkpoints/step_4/hf",
        f"rlctl train grpo --resume {run.path} grpo.num_steps=8",
    ]


def test_the_best_checkpoint_is_named_where_it_is_not_the_newest(tmp_path: Path) -> None:
    settled, run = write_run(tmp_path)
    checkpoints = Checkpoints(run.checkpoints, 9, 9)
    for step, score in ((2, 0.5), (4, 0.25)):
        checkpoints.save(step, {"score": score}, lambda path: (path / "hf").mkdir())
    assert next_commands(settled, run, "done")[1:4] == [
        f"rlctl eval {run.path} --step 2",
        f"rlctl export {run.path} sums-hf --step 2",
        f"vllm serve {run.path}/checkpoints/step_2/hf",
    ]
    sft = load("sft", None, ["sft.num_steps=4"]).settled
    assert next_commands(sft, run, "done")[2] == f"rlctl train grpo RECIPE model.path={run.path}/checkpoints/step_2"


@pytest.mark.parametrize(
    ("rank", "options"),
    [(1, ""), (16, ""), (17, " --max-lora-rank 32"), (32, " --max-lora-rank 32"), (400, " --max-lora-rank 512")],
)
def test_an_adapter_is_served_by_a_command_that_takes_its_rank(tmp_path: Path, rank: int, options: str) -> None:
    settled, run = write_run(tmp_path)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "base_model_name_or_path": "me/base"}
    export = run.checkpoints / "step_4" / "hf"
    (export / ADAPTER_CONFIG).write_text(json.dumps(config))
    assert next_commands(settled, run, "done")[2:4] == [
        f"rlctl export {run.path} sums-hf --merged",
        f"vllm serve me/base --enable-lora{options} --lora-modules sums={export}",
    ]


def test_an_adapter_that_was_damaged_is_not_offered(tmp_path: Path) -> None:
    settled, run = write_run(tmp_path)
    (run.checkpoints / "step_4" / "hf" / ADAPTER_CONFIG).write_text("{}")
    assert [command.split()[1] for command in next_commands(settled, run, "done")] == ["runs", "eval", "train"]


def test_a_failed_run_does_not_go_on_into_the_same_mistake(tmp_path: Path) -> None:
    settled, run = write_run(tmp_path)
    logs = f"rlctl runs logs {run.path}"
    assert next_commands(settled, run, "failed") == [f"rlctl train grpo --resume {run.path}", logs]
    assert next_commands(settled, run, "failed", fails_again=True) == [logs]


def test_what_is_not_there_is_not_offered(tmp_path: Path) -> None:
    settled, run = write_run(tmp_path, "data.validation.path=null", "checkpoint.metric=reward/mean", has_export=False)
    assert [command.split()[1] for command in next_commands(settled, run, "done")] == ["runs", "train"]
    assert next_commands(settled, run, "interrupted") == [f"rlctl train grpo --resume {run.path}"]


def test_an_sft_run_is_measured_by_a_grpo_recipe_and_its_weights_go_on_by_one(tmp_path: Path) -> None:
    settled, run = write_run(tmp_path, kind="sft")
    assert next_commands(settled, run, "done")[1:3] == [
        f"rlctl eval {run.path} RECIPE",
        f"rlctl train grpo RECIPE model.path={run.path}",
    ]
    settled_with_recipe = load("sft", None, ["sft.num_steps=4", "validation.recipe=grpo-tiny"]).settled
    assert next_commands(settled_with_recipe, run, "done")[1] == f"rlctl eval {run.path}"


def test_a_run_of_a_cluster_is_used_there(tmp_path: Path) -> None:
    settled, run = write_run(tmp_path)
    JobRecord("lab", "sums-1", "/work", remote="/far/sums", called="runs/sums").write(run.path)
    assert next_commands(settled, run, "done") == [
        "rlctl runs dash runs/sums",
        "rlctl train grpo --resume runs/sums --cluster lab grpo.num_steps=8",
    ]


@pytest.mark.parametrize(
    ("tracker", "file", "command"),
    [
        ("tensorboard", "", "tensorboard --logdir {run}/tensorboard"),
        ("{name: trackio, project: sums}", "", "trackio show --project sums"),
        ("{name: mlflow, experiment: sums}", "mlflow.db", "mlflow ui --backend-store-uri sqlite:///{run}/mlflow.db"),
        ("{name: wandb, project: sums}", "wandb/offline-run-2", "wandb sync {run}/wandb/offline-run-2"),
        ("{name: swanlab, project: s, mode: offline}", "swanlab/run-2", "swanlab sync {run}/swanlab/run-2"),
    ],
)
def test_a_tracker_is_shown_by_its_own_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, file: str, command: str
) -> None:
    monkeypatch.setattr("rlctl.preflight.checks.check_trackers", lambda config: iter(()))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    settled, run = write_run(tmp_path, f"telemetry.trackers=[{tracker}]")
    if file:
        (run.path / file).parent.mkdir(exist_ok=True)
        (run.path / file).touch()
    assert next_commands(settled, run, "done")[-2] == command.format(run=run.path)


def write_run_of_sizes(folder: Path, *overrides: str) -> tuple[Any, RunDir]:
    """Write a run with this config. Return its settled config too."""
    composed = load("grpo", None, list(overrides))
    _, run = write_run(folder)
    run.config.write_text(composed.to_yaml())
    return composed.settled, run


def test_a_run_that_lost_nodes_goes_on_with_as_many_processes_as_those_left_have_room_for(tmp_path: Path) -> None:
    settled, run = write_run_of_sizes(tmp_path, "trainer.num_ranks=8", "generation.num_engines=4", "trainer.replicas=2")
    request = requested_resources(settled)
    resume = f"rlctl train grpo --resume {run.path}"
    for cpus, ranks, engines in [(9.0, 6, 3), (3.0, 2, 1)]:
        smaller_requests = list(smaller_runs([NodeResources("n", 0, cpus)], request, 4, "cpu"))
        changes = f"trainer.num_ranks={ranks} generation.num_engines={engines} trainer.replicas=auto"
        assert next_commands(settled, run, "failed", smaller_requests)[0] == f"{resume} {changes}"
        assert next_commands(settled, run, "failed", [request, *smaller_requests])[0] == resume
    # Ranks that the layout has no use for are not proposed.
    layout = ("trainer.backend=megatron", "trainer.megatron.tensor_model_parallel_size=2")
    megatron, run = write_run_of_sizes(tmp_path / "megatron", "trainer.num_ranks=4", *layout)
    smaller_requests = [replace(requested_resources(megatron), ranks=ranks) for ranks in (3, 2)]
    assert next_commands(megatron, run, "failed", smaller_requests)[0].endswith(f"{run.path} trainer.num_ranks=2")
