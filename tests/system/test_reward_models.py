"""Whole runs with a reward model: its values are transformers' own, and a killed run goes on to the last bit."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from rlctl.config.builtin import RECIPES
from tests.faults.runs import WITHOUT_VLLM, Run, read
from tests.value_models import add_value_head, class_values, make_reward_model

POLICY = RECIPES / "tiny/qwen3-tiny"


def rewards(folder: Path, **keys: Any) -> str:
    return f"rewards={json.dumps([{'name': 'model', 'path': str(folder), **keys}])}"


def recorded_values(run: Run) -> list[tuple[str, str, float]]:
    """Return (prompt, answer, the model's value) of each recorded rollout."""
    values = []
    for group in read(run.path / "rollouts.jsonl"):
        for rollout in group.get("rollouts", []):
            sampled = "".join(part for part, is_sampled in rollout["text"] if is_sampled)
            values.append((group["prompt"], sampled.replace("<eos>", ""), rollout["rewards"]["model"]))
    return values


def assert_values_are_transformers(run: Run, folder: Path, text: str, atol: float = 1e-5) -> None:
    """Compare each recorded value with the class's score of the text alone. text: of a prompt and an answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    recorded = recorded_values(run)
    texts = [text.format(prompt=prompt, answer=answer) for prompt, answer, _ in recorded]
    sequences = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    assert len({tuple(tokens) for tokens in sequences}) > 16
    assert [value for *_, value in recorded] == pytest.approx(class_values(folder, sequences), rel=1e-5, abs=atol)


def test_a_resident_model_of_the_policys_tokens_values_training_and_validation(tmp_path: Path) -> None:
    folder = add_value_head(POLICY, tmp_path / "judge")
    settings = ("grpo.num_steps=2", "validation.every=2", "validation.max_prompts=16", "checkpoint.every=0")
    run = Run(tmp_path, "resident", rewards(folder), WITHOUT_VLLM, *settings)
    assert run.end() == 0, run.text()
    assert_values_are_transformers(run, folder, "{prompt}{answer}")
    assert not run.undeclared_metrics()
    for step in run.steps():
        assert step["reward/failed"] == step["reward_model/too_long"] == 0 and step["reward_model/tokens"] > 0
        assert step["reward/mean"] == step["reward/model/mean"] and step["time/reward"] > 0


@pytest.mark.long  # a run
@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_engines_value_by_another_tokenizer_and_template_and_a_lost_one_is_rebuilt(engine: str, tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "judge", "llama")
    settings = (rewards(folder, place="engines"), "grpo.num_steps=6", "async.enabled=true", "validation.max_prompts=16")
    run = Run(tmp_path, "engines", *settings, *((WITHOUT_VLLM,) if engine == "torch" else ()))
    run.wait_for_step(2)
    (processes,) = run.events("processes")
    psutil.Process(processes["rewards.0-0"]).kill()
    assert run.end() == 0, run.text()
    # vLLM's kernels round otherwise: 2.1e-5 at values up to 20.
    assert_values_are_transformers(run, folder, "u:{prompt}\na:{answer}\n", atol=5e-5)
    (lost,) = run.events("engine_lost")
    assert lost["role"] == "rewards.0" and all(step["reward/failed"] == 0 for step in run.steps())


@pytest.mark.long  # three attempts
def test_a_killed_run_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    folder = add_value_head(POLICY, tmp_path / "judge")
    settings = (rewards(folder), WITHOUT_VLLM, "grpo.num_steps=4", "checkpoint.every=2", "validation.every=0")
    whole = Run(tmp_path, "whole", *settings)
    assert whole.end() == 0, whole.text()
    killed = Run(tmp_path, "killed", *settings)
    killed.wait_for_step(4)
    killed.kill()
    resumed = Run(tmp_path, "killed", resume=True)
    assert resumed.end() == 0, resumed.text()
    for step, expected in zip(resumed.steps()[-2:], whole.steps()[-2:], strict=True):
        names = ("reward/mean", "reward/model/mean", "loss/policy", "train/grad_norm", "reward_model/tokens")
        assert [step.get(name) for name in names] == [expected.get(name) for name in names]


@pytest.mark.long  # a start
def test_a_first_row_that_is_too_long_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    folder = add_value_head(POLICY, tmp_path / "judge")
    run = Run(tmp_path, "long", rewards(folder, max_length=7), WITHOUT_VLLM, "grpo.num_steps=3")
    assert run.end() == 2, run.text()
    assert "model: has too many tokens for the model: 8, at least 2 and at most 7" in run.text()
    assert run.steps() == []
