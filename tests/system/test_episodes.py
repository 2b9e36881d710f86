"""Whole runs whose rollouts are episodes: a game without tools, a game with tools, and environments that fail."""

import json
import random
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.config.builtin import RECIPES
from rlctl.telemetry.exact_tokens import unpack
from tests.faults.runs import Run, read, survivors
from tests.faults.test_resume import check_same_runs

GUESS = (
    "environment.name=guess",
    "environment.args={guesses: 4, prompt: '{low}-{high}=', higher: '+', lower: '-', unclear: '*'}",
    "environment.max_turns=3",
    "rewards=[]",
)
# Adds one, or raises; each call is one token of the model's.
ADDER = """
class Adder:
    def reset(self, start, **row):
        self.count = start
        return f"{start}="

    def add(self, n: int) -> str:
        '''Add.

        Args:
            n: The number.
        '''
        self.count += n
        return str(self.count)

    def get_reward(self):
        return {"sum": float(self.count), "odd": float(self.count % 2)}

def worth(environments, completions, start, **columns):
    assert completions[0][0]["role"] == "assistant"
    return [environment.count - first for environment, first in zip(environments, start)]
"""
CALLS = ('{"name": "add", "arguments": {"n": 1}}', '{"name": "add", "arguments": {"n": "x"}}', '{"name": "add"')
# One episode in ten fails, in one of three ways; one that kills its process takes the others in it along.
FLAKY = """
import os, random, time

FATES = ["well"] * 100 + ["raise"] * 8 + ["hang"] * 2 + ["kill"]

class Flaky:
    def reset(self, start, **row):
        self.turns = 0
        self.fate = random.SystemRandom().choice(FATES)
        return f"{start}="

    def step(self, message):
        self.turns += 1
        if self.turns == 2 and self.fate == "raise":
            raise ValueError("no more")
        if self.turns == 2 and self.fate == "hang":
            time.sleep(600)
        if self.turns == 2 and self.fate == "kill":
            os.abort()
        return "+" if self.turns < 3 else None

    def get_reward(self):
        return 1.0
"""


def tasks(folder: Path, count: int) -> Path:
    path = folder / f"tasks-{count}.jsonl"
    draw = random.Random(count)
    rows = [{"start": n, "low": n, "high": n + 9, "secret": n + draw.randint(0, 9)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data(folder: Path) -> tuple[str, ...]:
    return f"data.train.path={tasks(folder, 40)}", f"data.validation.path={tasks(folder, 6)}"


def calling_model(folder: Path) -> Path:
    """Save a random model some of whose tokens are whole calls of a tool."""
    shutil.copytree(RECIPES / "tiny/qwen3-tiny", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token, call in enumerate(CALLS, 18):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer["added_tokens"].append({"id": token, "content": f"<tool_call>{call}</tool_call>", **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    return folder


def groups(run: Run) -> list[dict[str, Any]]:
    return [record for record in read(run.path / "rollouts.jsonl") if record["kind"] == "group"]


def recorded_rollouts(run: Run) -> list[dict[str, Any]]:
    return list(chain.from_iterable(group["rollouts"] for group in groups(run)))


def look_at_episodes(run: Run, purpose: str) -> list[dict[str, Any]]:
    """Check that each recorded rollout has its conversation: sampled and other messages alternate. Return all."""
    groups_of_purpose = [group for group in groups(run) if group["purpose"] == purpose]
    rollouts = list(chain.from_iterable(group["rollouts"] for group in groups_of_purpose))
    assert rollouts
    for rollout in rollouts:
        sampled = [is_sampled for _, is_sampled in rollout["text"]]
        episode = rollout["episode"]
        assert sampled == [bool(index % 2) for index in range(2 * episode["turns"])]
        roles = [message["role"] for message in episode["messages"]]
        assert roles[0] == "user" and roles.count("assistant") == episode["turns"]
    return rollouts


def look_at_tokens(run: Run) -> None:
    """Check that each recorded rollout has the ids of its text, and log-probs of the sampled ones."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.path / "checkpoints/step_3/hf")
    for group in groups(run):
        for rollout, (row,) in zip(group["rollouts"], unpack(group) or (), strict=True):
            spans = [row.tokens[span].tolist() for span in row.spans() if row.sampled[span.start]]
            sampled_texts = [text for text, is_sampled in rollout["text"] if is_sampled]
            assert [tokenizer.decode(span) for span in spans] == sampled_texts
            assert row.sampled.sum() == rollout["tokens"]
            assert set(row.versions[row.sampled]) == {int(version) for version in rollout["versions"]}
            assert np.isfinite(row.log_probs).all() and (row.log_probs[row.sampled] < 0).any()


def test_a_game_is_trained_on_all_of_its_turns_token_for_token(tmp_path: Path) -> None:
    run = Run(tmp_path, "guess", *GUESS, *data(tmp_path), "grpo.num_steps=3", "validation.every=3")
    assert run.end() == 0, run.text()
    for step in run.steps():
        assert step["mismatch/token_mult_prob_error"] < 1.001
        assert 1 <= step["environment/turns"] <= 3 and step["environment/failed"] == 0
        assert sum(value for name, value in step.items() if name.startswith("environment/endings/")) == pytest.approx(1)
        assert step["environment/rows"] == 1 and step["reward/environment/failed"] == 0
        assert 0 <= step["generator/prefix_hit_share"] < 1
    for purpose in ("train", "validation"):
        rollouts = look_at_episodes(run, purpose)
        assert {rollout["episode"]["ending"] for rollout in rollouts} <= {"done", "max_turns"}
    look_at_tokens(run)
    validated = [record for record in read(run.path / "metrics.jsonl") if record["kind"] == "validation"]
    assert all(record["validation/turns"] >= 1 and "validation/accuracy" in record for record in validated)


@pytest.mark.long  # the game above shows most of this
def test_an_asynchronous_run_calls_tools_while_weights_change(tmp_path: Path) -> None:
    (tmp_path / "adder.py").write_text(ADDER)
    settings = (
        f"model.path={calling_model(tmp_path / 'model')}",
        "model.random_init=true",
        "environment={name: adder.py:Adder, tool_format: hermes, max_turns: 4}",
        "rewards=[{name: adder.py:worth}]",
        "async={enabled: true, max_trajectory_age_steps: 2}",
        "health.parity_every=2",
        "grpo.num_steps=4",
    )
    run = Run(tmp_path, "tools", *settings, *data(tmp_path))
    assert run.end() == 0, run.text()
    steps = run.steps()
    assert max(step["mismatch/parity"] for step in steps if "mismatch/parity" in step) < 1.001
    assert all(step["age/max"] <= 2 for step in steps)
    assert sum(step["environment/tool_calls"] for step in steps) > 0
    assert any(0 < step["environment/tool_errors"] < 1 for step in steps)
    assert all({"reward/sum/mean", "reward/odd/mean", "reward/worth/mean"} <= step.keys() for step in steps)
    # A third of its possible calls adds text to a number.
    assert any(step["environment/tool_raised"] > 0.25 for step in steps)
    messages = [event["what"] for event in read(run.path / "events.jsonl") if "tool add: " in event.get("what", "")]
    assert messages[0].startswith("tool add: raised TypeError at adder.py:13: ")
    assert "tools raised in " in run.text() and "most of them add: raised TypeError at adder.py:13" in run.text()
    rollouts = look_at_episodes(run, "train")
    assert {rollout["episode"]["ending"] for rollout in rollouts} <= {"answered", "max_turns", "max_length"}
    for rollout in rollouts:
        assert rollout["reward"] == pytest.approx(sum(rollout["rewards"].values()))
        tool_texts = [message["content"] for message in rollout["episode"]["messages"] if message["role"] == "tool"]
        assert rollout["rewards"]["worth"] == sum(not text.startswith("Error") for text in tool_texts)


@pytest.mark.long  # hangs and kills take their time
def test_episodes_that_fail_are_left_out_and_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    settings = (
        "environment={name: flaky.py:Flaky, timeout_s: 3, max_retries: 0}",
        "rewards=[]",
        "grpo.num_steps=4",
        "grpo.num_prompts_per_step=16",
        "health.max_failed_reward_share=1",
        "telemetry.groups_per_step=16",
        "validation.every=0",
    )
    run = Run(tmp_path, "flaky", *settings, *data(tmp_path))
    assert run.end() == 0, run.text()
    steps = run.steps()
    assert sum(step["environment/failed"] for step in steps) > 0
    assert all(step.get("reward/mean", 1.0) == 1.0 for step in steps)
    rollouts = recorded_rollouts(run)
    outcomes = {(rollout["reward"], rollout["episode"]["ending"]) for rollout in rollouts}
    assert outcomes == {(1.0, "done"), (None, "failed")}
    failed = [rollout["failed"] for rollout in rollouts if rollout["reward"] is None]
    assert all(reason.startswith("environment: ") for reason in failed)


@pytest.mark.long  # as with rewards: tests/faults/test_rewards.py
def test_an_environment_that_always_fails_stops_the_run_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "dead.py").write_text(FLAKY.replace("choice(FATES)", "choice(['raise'])"))
    settings = ("environment={name: dead.py:Flaky, max_retries: 0}", "rewards=[]", "run.probe=false")
    run = Run(tmp_path, "dead", *settings, *data(tmp_path), "grpo.num_steps=9", "validation.every=0")
    assert run.end() == 1
    assert "rewards failed for 100% of the rollouts" in run.text() and "ValueError" in run.text()


@pytest.mark.long  # two whole runs
def test_a_killed_run_of_episodes_goes_on_bit_for_bit(tmp_path: Path) -> None:
    settings = (*GUESS, *data(tmp_path), "checkpoint.every=2", "checkpoint.keep_last=1000", "grpo.num_steps=100000")
    hurt = Run(tmp_path, "hurt", *settings)
    hurt.wait_for_step(4)
    assert survivors(hurt.kill()) == []
    resumed = Run(tmp_path, "hurt", "grpo.num_steps=6", resume=True)
    assert resumed.end() == 0, resumed.text()
    unhurt = Run(tmp_path, "whole", *settings[:-1], "grpo.num_steps=6")
    assert unhurt.end() == 0, unhurt.text()
    check_same_runs(resumed, unhurt, 6)


GAMES = (
    *("model.path=tiny/qwen3-games", "model.random_init=true", "generation.max_new_tokens=6", "rewards=[]"),
    "environment={name: guess, max_turns: 5}",
    *("grpo.num_steps=6", "health.parity_every=1", "telemetry.groups_per_step=8", "validation.every=0"),
)
LAYOUTS = {
    "two engines, two ranks, age 1": ("generation.num_engines=2", "trainer.num_ranks=2"),
    "megatron, age 0": ("trainer.backend=megatron",),
    "megatron on two tensor ranks, age 4": (
        *("trainer.backend=megatron", "trainer.num_ranks=2", "trainer.megatron.tensor_model_parallel_size=2"),
    ),
}


@pytest.mark.long  # combinations
@pytest.mark.parametrize("layout", LAYOUTS)
def test_episodes_on_every_backend_on_several_ranks_and_engines_at_every_age(tmp_path: Path, layout: str) -> None:
    age = int(layout[-1])
    # Age 0 is a synchronous run: its own tokens tell the mismatch.
    asynchronous = f"async={{enabled: {'true' if age else 'false'}, max_trajectory_age_steps: {max(1, age)}}}"
    settings = GAMES + data(tmp_path) + LAYOUTS[layout]
    run = Run(tmp_path, "layout", *settings, asynchronous)
    assert run.end() == 0, run.text()
    steps = run.steps()
    assert len(steps) == 6 and max(step.get("age/max", 0) for step in steps) in range(min(1, age), age + 1)
    assert max(step["mismatch/parity" if age else "mismatch/token_mult_prob_error"] for step in steps) < 1.001
    assert all(step["environment/failed"] == 0 and step["environment/rows"] == 1 for step in steps)
    # Turns find the prompt of their group and their earlier turns: they stay with their engine.
    assert max(step["generator/prefix_hit_share"] for step in steps) > 0.2
    assert max(rollout["episode"]["turns"] for rollout in look_at_episodes(run, "train")) == 5


def thinking_model(folder: Path) -> Path:
    """Save a random model with a token for a thought, and a template that drops thoughts of earlier turns."""
    calling_model(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"].startswith("<tool_call>"):
            token["content"] = f"<think>{token['id']}</think>"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    thoughtless = "m['content'] if m['role'] != 'assistant' or loop.last else m['content'].split('</think>')[-1]"
    settings["chat_template"] = settings["chat_template"].replace("m['content']", thoughtless)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.long  # combination
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_a_history_that_is_written_anew_trains_as_several_rows_of_one_rollout(tmp_path: Path, loss: str) -> None:
    settings = (
        *(f"model.path={thinking_model(tmp_path / 'model')}", "model.random_init=true"),
        *(*GUESS, "environment.history=strip", "environment.max_turns=4"),
        *("trainer.num_ranks=2", f"grpo.loss.name={loss}", "grpo.num_steps=4", "validation.every=0"),
        *("telemetry.groups_per_step=8", "grpo.updates_per_step=2"),
    )
    run = Run(tmp_path, "strip", *settings, *data(tmp_path))
    assert run.end() == 0, run.text()
    for step in run.steps():
        assert step["mismatch/token_mult_prob_error"] < 1.001
        assert step["environment/rows"] > 1.1 and step["environment/failed"] == 0
        assert step["tokens/trained"] == step["tokens/prompt"] + step["tokens/generated"]
    assert max(step["train/grad_norm"] for step in run.steps()) > 0
    rollouts = recorded_rollouts(run)
    messages = chain.from_iterable(rollout["text"] for rollout in rollouts)
    assert any("</think>" in text for text, is_sampled in messages if is_sampled)
    assert all(rollout["advantage"] is not None for rollout in rollouts)
