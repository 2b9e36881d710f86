"""Whole runs with a teacher: rewards or none, each place and kind of teacher, several of them, and a killed run."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rlctl.config.builtin import RECIPES
from tests.faults.runs import WITHOUT_VLLM, Run
from tests.faults.test_resume import check_a_kill_changes_nothing
from tests.zoo import make_family

TEACHER = RECIPES / "tiny/qwen3-sums"
TERM = ("grpo.loss.distillation={}", "grpo.num_generations_per_prompt=1", "grpo.num_prompts_per_step=16")
# Without vLLM's start of 9 s of CPU. `opd-tiny` itself has vLLM.
DISTILLED = (f"teacher.path={TEACHER}", *TERM, WITHOUT_VLLM, "validation.every=0")
SHORT = ("grpo.num_steps=2", "checkpoint={every: 0, at_end: true}")


def weights_of(run: Run, step: int) -> bytes:
    return (run.path / f"checkpoints/step_{step}/hf/model.safetensors").read_bytes()


def make_teacher(folder: Path, family: str, **other: Any) -> Path:
    """Make a random model with the tokenizer of the tiny recipe."""
    make_family(folder, family, vocab_size=32, **other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TEACHER / name).read_bytes())
    return folder


def test_a_run_without_rewards_trains_as_one_whose_rewards_weigh_nothing(tmp_path: Path) -> None:
    weightless = Run(tmp_path, "weightless", *DISTILLED, *SHORT, "rewards=[{name: exact, weight: 0}]")
    assert weightless.end() == 0, weightless.text()
    run = Run(tmp_path, "none", *DISTILLED, *SHORT, "rewards=[]", "validation={every: 1, max_prompts: 8}")
    assert run.end() == 0, run.text()
    assert weights_of(run, 2) == weights_of(weightless, 2)
    for step in run.steps():
        assert step["loss/teacher"] > 0.1 and step["loss/policy"] == 0 and step["train/grad_norm"] > 0
        assert step["reward/failed"] == 0 and "reward/accuracy" not in step
        assert step["time/teacher"] > 0 and "time/log_probs" not in step and "train/teacher" not in step
    assert not run.events("health")
    assert run.undeclared_metrics() == set()


@pytest.mark.long  # three runs; the trainer's part is in training/test_roles.py
@pytest.mark.parametrize("place", ["swapped", "resident"])
def test_a_killed_run_goes_on_bit_for_bit(place: str, tmp_path: Path) -> None:
    settings = (*DISTILLED, "rewards=[]", f"teacher.place={place}", "grpo.num_steps=4")
    settings += ("grpo.loss.kl_coef=0.01", "checkpoint={every: 1, keep_last: 9}")
    check_a_kill_changes_nothing(tmp_path, settings, last=4)
    other = Run(tmp_path, "killed", f"teacher.path={RECIPES / 'tiny/qwen3-tiny'}", "grpo.num_steps=5", resume=True)
    assert other.end() == 2
    assert "not the weights of the teacher of the checkpoint of step 4" in other.text()


@pytest.mark.long  # a run each
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_teacher_of_another_size_or_architecture_teaches(family: str, tmp_path: Path) -> None:
    other = {"hidden_size": 64} if family == "qwen3" else {}
    folder = make_teacher(tmp_path / "teacher", family, **other)
    run = Run(tmp_path, "other", *DISTILLED, *SHORT, "rewards=[]", f"teacher.path={folder}")
    assert run.end() == 0, run.text()
    assert all(step["loss/teacher"] > 0 for step in run.steps())


@pytest.mark.long  # two runs
def test_adapters_are_taught_by_a_whole_model_and_by_an_adapter_over_their_base(tmp_path: Path) -> None:
    lora = ("lora={rank: 4, alpha: 8}", "trainer.optimizer.lr=1e-3", "rewards=[]")
    first = Run(tmp_path, "first", *DISTILLED, *SHORT, *lora, "generation.engine=vllm")
    assert first.end() == 0, first.text()
    second = Run(
        tmp_path, "second", *DISTILLED, *SHORT, *lora, "generation.engine=vllm",
        f"teacher={{path: null, lora: {first.path}}}",
    )  # fmt: skip
    assert second.end() == 0, second.text()
    # The adapter has made two small steps away from the base, where the second policy begins.
    assert 0 < second.steps()[0]["loss/teacher"] < first.steps()[0]["loss/teacher"]


@pytest.mark.long  # a run
def test_rows_choose_among_several_teachers_in_an_asynchronous_run_of_bound_two(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (RECIPES / "tiny-data/train.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["school"] = ("sums", "mute")[number % 2]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mute = tmp_path / "mute"
    mute.mkdir()
    for file in TEACHER.iterdir():
        (mute / file.name).write_bytes(file.read_bytes())
    tensors = load_file(mute / "model.safetensors")
    save_file({name: 0 * tensor for name, tensor in tensors.items()}, mute / "model.safetensors", {"format": "pt"})
    teachers = f"teachers={{sums: {{path: {TEACHER}}}, mute: {{path: {mute}, place: swapped}}}}"
    settings = (teachers, "teacher_key=school", f"data.train.path={data}", *TERM, WITHOUT_VLLM, "validation.every=0")
    run = Run(
        tmp_path, "several", *settings, "rewards=[]", "grpo.num_steps=6", "async.enabled=true",
        "async.max_trajectory_age_steps=2",
    )  # fmt: skip
    assert run.end() == 0, run.text()
    assert len(run.steps()) == 6 and max(step["loss/teacher"] for step in run.steps()) < 4
    del rows[7]["school"]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = Run(tmp_path, "refused", *settings, "rewards=[]", "grpo.num_steps=6")
    assert refused.end() == 2
    assert "train.jsonl:8: column 'school' must be one of sums, mute, not None (teachers)" in refused.text()
