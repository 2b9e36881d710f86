"""Contradictions to a checkpoint are known from the files alone; other values may change."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.data.tasks import SupervisedSample, Task
from rlctl.preflight.load import load
from rlctl.run.fingerprint import contradictions, digest_rows, made_with, sizes_of
from tests.unit import folders


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folders.write(tmp_path / "home"))
    return tmp_path / "home"


def facts(*overrides: str, kind: str = "grpo") -> dict[str, Any]:
    """As they are read back from a checkpoint."""
    run = load(kind, f"{kind}.recipe.yaml", list(overrides)).settled
    found: dict[str, Any] = json.loads(json.dumps(made_with(run, Path(run.config.model.path))))
    return found


def copy(home: Path, name: str, change: Callable[[dict[str, Any]], None] = lambda config: None) -> str:
    folder = home / name
    folder.mkdir()
    for file in (home / "model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return f"model.path={name}"


def keys(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [each.key for each in contradictions(then, now, 4)]


def test_what_may_change_on_a_resume(home: Path) -> None:
    then = facts()
    moved = copy(home, "moved", lambda config: config.update(transformers_version="9", torch_dtype="float32"))
    (home / "elsewhere.jsonl").write_bytes((home / "train.jsonl").read_bytes())
    for allowed in (
        (moved, "data.train.path=elsewhere.jsonl"),
        ("trainer.backend=megatron",),
        ("trainer.num_ranks=2", "trainer.optimizer.lr=1e-4", "trainer.dtype=bfloat16"),
        ("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "async.enabled=true"),
        ("generation.max_new_tokens=8", "validation.every=3"),
    ):
        assert keys(then, facts(*allowed)) == []


def test_another_model_is_refused_with_the_sizes_that_differ(home: Path) -> None:
    then = facts()
    other = copy(home, "other", lambda config: config.update(hidden_size=32, rope_parameters={"factor": 2.0}))
    (found,) = contradictions(then, facts(other), 4)
    assert str(found) == (
        f"{home}/model -> {home}/other: not the model of the checkpoint of step 4: hidden_size 64 -> 32"
    )


def test_a_setting_that_no_list_of_ours_names_is_compared_too(home: Path) -> None:
    """A family brings new keys, and a text model may stand in a part of config.json."""
    settings: dict[str, dict[str, Any]] = {
        "scaled": {"mamba_multiplier": 1.0, "vision_config": {"depth": 2}},
        "wrapped": {"text_config": {"mamba_multiplier": 0.5}},
        "deeper": {"mamba_multiplier": 1.0, "vision_config": {"depth": 3}},
    }
    for name, new in settings.items():
        copy(home, name, lambda config, new=new: config.update(new))  # type: ignore[misc]
    then = {**facts(), "model": sizes_of(home / "scaled")}
    for folder, change in (("wrapped", "mamba_multiplier 1.0 -> 0.5"), ("deeper", "vision_config.depth 2 -> 3")):
        (found,) = contradictions(then, {**then, "model": sizes_of(home / folder)}, 4)
        assert str(found).endswith(f"not the model of the checkpoint of step 4: {change}")


def test_another_vocabulary_is_refused(home: Path) -> None:
    then = facts()
    other = copy(home, "other")
    (home / "other/tokenizer.json").write_text('{"model": 1}')
    assert keys(then, facts(other)) == ["model.path"]
    assert keys(then, facts("model.tokenizer=other")) == ["model.tokenizer"]
    assert keys(then, facts("model.tokenizer=model")) == []


def test_other_data_are_refused(home: Path) -> None:
    then, sft = facts(), facts(kind="sft")
    for key, value in (
        ("data.train.limit", "1"),
        ("data.train.prompt_key", "answer"),
        ("data.max_prompt_length", "32"),
        ("data.shuffle", "false"),
        ("run.seed", "1"),
    ):
        assert key in keys(then, facts(f"{key}={value}"))
    assert keys(sft, facts("sft.mask=last", kind="sft")) == ["sft.mask"]
    assert keys(facts("data.shuffle=false"), facts("data.shuffle=false", "run.seed=1")) == []
    (home / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "3"}\n')
    (found,) = contradictions(then, facts(), 4)
    assert (found.key, found.new) == ("data.train.path", "other content")


def test_another_reference_policy_is_refused_where_there_is_one(home: Path) -> None:
    other = copy(home, "other")
    (home / "other/model.safetensors").write_bytes(folders.weights("others"))
    assert keys(facts(), facts(other)) == []
    kl = "grpo.loss.kl_coef=0.1"
    assert keys(facts(kl), facts(kl)) == []
    assert keys(facts(kl), facts(kl, other)) == ["model.path"]
    assert keys(facts(kl), facts(kl, "model.random_init=true")) == ["model.path"]
    # A checkpoint of before has another digest, under another key.
    earlier = {key: value for key, value in facts(kl).items() if key != "frozen"} | {"weights": "of both ends"}
    assert keys(earlier, facts(kl, other)) == []


def test_no_value_that_may_be_secret_is_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSONA", "hunter2")
    found = facts("data.system_prompt=${oc.env:PERSONA}")
    assert "hunter2" not in json.dumps(found)
    assert keys(found, facts("data.system_prompt=other")) == ["data.system_prompt"]


def test_rows_have_a_digest_that_each_of_them_changes() -> None:
    prompts = [Task("r0", [1, 2], "", "3"), Task("r1", [4], "", None)]
    ours = digest_rows(prompts)
    assert digest_rows([*prompts]) == ours
    others = [prompts[::-1], prompts[:1], [replace(prompts[0], answer="4"), prompts[1]]]
    others.append([replace(prompts[0], tokens=[1, 2, 4]), replace(prompts[1], tokens=[])])
    assert ours not in map(digest_rows, others)
    samples = [SupervisedSample("r0", np.array([1, 2], np.int32), np.array([False, True]))]
    assert digest_rows(samples) != digest_rows([replace(samples[0], mask=np.array([True, True]))])
