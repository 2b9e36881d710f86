"""NaN and infinity in a run: rollouts are left out and counted, or the run stops before an update with good weights."""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.faults.runs import Run, read
from tests.tiny_models import make_model

# Two characters that are never sampled. The embedding of the first one is NaN.
POISON = "?"
UNLIKELY = "y"


def make_poisoned_model(folder: Path) -> Path:
    """Make a model with NaN after a `?`, and nowhere else."""
    make_model(folder, "llama", scale=1.0)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    head = weights["lm_head.weight"]
    # All embeddings share this direction, and the output rows of the two characters are opposed to it.
    embedding[:, 0] = 3.0
    head[:, 0] = 0.0
    head[[vocabulary[POISON], vocabulary[UNLIKELY]], 0] = -100.0
    embedding[vocabulary[POISON]] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_data_set(path: Path, *prompts: str, answers: dict[int, str] | None = None) -> Path:
    """Write a data set with a row for each prompt. answers: index of a row -> its answer; other rows have 12."""
    rows = [{"prompt": prompt, "answer": (answers or {}).get(row, "12")} for row, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def warnings(run: Run, check: str) -> list[dict[str, Any]]:
    return [event for event in run.events("warning") if event.get("check") == check]


def is_unharmed(checkpoint: Path) -> bool:
    """Return True if the only weights of the export that are NaN or infinite are those of the initial model."""
    weights = load_file(checkpoint / "hf" / "model.safetensors")
    return [name for name, tensor in weights.items() if not tensor.isfinite().all()] == ["model.embed_tokens.weight"]


def test_rollouts_with_a_nan_are_left_out_and_too_many_stop_the_run_before_the_update(tmp_path: Path) -> None:
    good_prompts = [f"{digit}+1=" for digit in range(8)]
    bad_prompts = [f"{digit}?1=" for digit in range(8)]
    prompts = good_prompts + good_prompts[:7] + ["1?2="] + bad_prompts
    data = write_data_set(tmp_path / "data.jsonl", *prompts)
    # The reward differs between rollouts, so that there is something to learn.
    reward = tmp_path / "odd.py"
    reward.write_text("def odd(prompt, completion, answer, row):\n    return len(completion) % 2\n")
    run = Run(
        tmp_path, "nan", f"model.path={make_poisoned_model(tmp_path / 'model')}", f"data.train.path={data}",
        f"rewards=[{{name: '{reward}:odd'}}]", "data.shuffle=false", "validation.every=0", "grpo.num_steps=9",
        "health.max_non_finite_rollouts=0.2", "checkpoint.every=0", "generation.max_new_tokens=4",
    )  # fmt: skip
    assert run.end() == 1, run.text()

    # In step 2 one prompt of eight, four rollouts each; in step 3 every prompt.
    steps = run.steps()
    assert [step["rollouts/non_finite"] for step in steps] == [0, 4]
    assert all(step["loss/policy"] == pytest.approx(0, abs=1) and step["train/grad_norm"] > 0 for step in steps)
    (warning,) = warnings(run, "non_finite")
    assert warning["step"] == 2
    assert warning["what"].endswith("left out because a log-prob of theirs is not finite: 4: first prompt e0-r15, "
                                 "rollout 0, token 0: rollout_log_prob is nan")  # fmt: skip
    prompts_by_step = {
        record["step"]: record for record in read(run.path / "rollouts.jsonl") if record["kind"] == "prompts"
    }
    second = prompts_by_step[2]
    left_out = [(rollout["prompt_id"], rollout["rollout"], rollout["column"]) for rollout in second["left_out"]]
    assert left_out == [("e0-r15", rollout, "rollout_log_prob") for rollout in range(4)]
    assert second["dropped"] == {"log-probs that are not finite": ["e0-r15"]}
    assert len(second["trained"]) == 7

    (end,) = run.events("run_ended")
    assert end["reason"].startswith("step 3: 32 of 32 rollouts have a log-prob that is not finite, at most 20%")
    assert end["reason"].endswith("rollout_log_prob is nan; the last checkpoint is of step 2")
    assert end["next"][0] == f"rlctl train grpo --resume {run.path}"
    assert is_unharmed(run.path / "checkpoints" / "step_2")
    assert "warnings non finite (step 2)" in " ".join(run.text().split())


@pytest.mark.long  # the stop in SFT; its parts: system/training/test_no_step.py, unit/run/test_health.py
def test_sft_tells_of_a_jump_and_stops_before_an_update_that_is_not_finite(tmp_path: Path) -> None:
    data = write_data_set(tmp_path / "data.jsonl", *["1+2="] * 12, "1?2=", *["1+2="] * 9, answers={11: UNLIKELY})
    run = Run(
        tmp_path, "sft", f"model.path={make_poisoned_model(tmp_path / 'model')}", f"data.train.path={data}",
        "model.random_init=false", "data.shuffle=false", "validation.every=0", "sft.num_steps=20", "sft.batch_size=1",
        "trainer.optimizer.lr=1e-6", "checkpoint.every=0",
        kind="sft",
    )  # fmt: skip
    assert run.end() == 1, run.text()
    norms = [step["train/grad_norm"] for step in run.steps()]
    assert len(norms) == 12
    (warning,) = warnings(run, "grad_norm") or [{}]
    assert (warning.get("step"), warning.get("bound")) == (12, 20), norms
    assert warning["value"] == pytest.approx(norms[-1] / median(norms[:-1]))
    (end,) = run.events("run_ended")
    assert end["reason"].startswith("step 13: the loss is nan and the gradient norm is nan (first in ")
    assert end["reason"].endswith("the weights were left as they were; the last checkpoint is of step 12")
    checkpoint = run.path / "checkpoints" / "step_12"
    assert is_unharmed(checkpoint)
    assert json.loads((checkpoint / "state.json").read_text())["cursor"]["index"] == 12, "sample 13 was not trained"


@pytest.mark.long  # the same stop, by a rate of learning
def test_a_rate_at_which_weights_overflow_stops_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, "wild", "trainer.optimizer.lr=1e30", "sft.num_steps=9", "validation.every=0", kind="sft")
    assert run.end() == 1, run.text()
    (end,) = run.events("run_ended")
    assert re.match(rf"step {len(run.steps()) + 1}: the (loss|gradient norm) is (nan|inf)", end["reason"])
    assert (run.path / "checkpoints" / f"step_{len(run.steps())}" / "state.json").exists()
