"""Contradictions to a checkpoint are known from the files alone; other values may change."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.data.tasks import SupervisedSample, Task
from rlctl.models.model_settings import settings_of
from rlctl.preflight.load import load
from rlctl.run.fingerprint import contradictions, digest_rows, made_with
from tests.unit import folders


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folders.write(tmp_path / "home"))
    return tmp_path / "home"


def find_facts(*overrides: str, kind: str = "grpo") -> dict[str, Any]:
    """Return the facts of a run as they are read back from its checkpoint."""
    settled = load(kind, f"{kind}.recipe.yaml", list(overrides)).settled
    facts: dict[str, Any] = json.loads(json.dumps(made_with(settled, Path(settled.config.model.path))))
    return facts


def copy_model(home: Path, name: str, change: Callable[[dict[str, Any]], None] = lambda config: None) -> str:
    """Copy the model and change its config. Return the override that names the copy."""
    folder = home / name
    folder.mkdir()
    for file in (home / "model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return f"model.path={name}"


def list_keys(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the keys whose values contradict the checkpoint."""
    return [contradiction.key for contradiction in contradictions(then, now, 4)]


def test_what_may_change_on_a_resume(home: Path) -> None:
    then = find_facts()
    moved = copy_model(home, "moved", lambda config: config.update(transformers_version="9", torch_dtype="float32"))
    (home / "elsewhere.jsonl").write_bytes((home / "train.jsonl").read_bytes())
    for overrides in (
        (moved, "data.train.path=elsewhere.jsonl"),
        ("trainer.backend=megatron",),
        ("trainer.num_ranks=2", "trainer.optimizer.lr=1e-4", "trainer.dtype=bfloat16"),
        ("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "async.enabled=true"),
        ("generation.max_new_tokens=8", "validation.every=3"),
    ):
        assert list_keys(then, find_facts(*overrides)) == []


def test_another_model_is_refused_with_the_sizes_that_differ(home: Path) -> None:
    then = find_facts()
    other = copy_model(home, "other", lambda config: config.update(hidden_size=32, rope_parameters={"factor": 2.0}))
    (contradiction,) = contradictions(then, find_facts(other), 4)
    assert str(contradiction) == (
        f"{home}/model -> {home}/other: not the model of the checkpoint of step 4: hidden_size 64 -> 32"
    )


def test_a_setting_that_no_list_of_ours_names_is_compared_too(home: Path) -> None:
    """Compare keys that a new family brings, and the config of a text model inside a part of config.json."""
    settings: dict[str, dict[str, Any]] = {
        "scaled": {"mamba_multiplier": 1.0, "vision_config": {"depth": 2}},
        "wrapped": {"text_config": {"mamba_multiplier": 0.5}},
        "deeper": {"mamba_multiplier": 1.0, "vision_config": {"depth": 3}},
    }
    for name, changes in settings.items():
        copy_model(home, name, lambda config, changes=changes: config.update(changes))  # type: ignore[misc]
    then = {**find_facts(), "model": settings_of(home / "scaled")}
    for folder, change in (("wrapped", "mamba_multiplier 1.0 -> 0.5"), ("deeper", "vision_config.depth 2 -> 3")):
        (contradiction,) = contradictions(then, {**then, "model": settings_of(home / folder)}, 4)
        assert str(contradiction).endswith(f"not the model of the checkpoint of step 4: {change}")


def test_another_vocabulary_is_refused(home: Path) -> None:
    then = find_facts()
    other = copy_model(home, "other")
    (home / "other/tokenizer.json").write_text('{"model": 1}')
    assert list_keys(then, find_facts(other)) == ["model.path"]
    assert list_keys(then, find_facts("model.tokenizer=other")) == ["model.tokenizer"]
    assert list_keys(then, find_facts("model.tokenizer=model")) == []


def test_other_data_are_refused(home: Path) -> None:
    then = find_facts()
    for key, setting in (
        ("data.train.limit", "1"),
        ("data.train.prompt_key", "answer"),
        ("data.max_prompt_length", "32"),
        ("data.shuffle", "false"),
        ("run.seed", "1"),
    ):
        assert key in list_keys(then, find_facts(f"{key}={setting}"))
    sft_then = find_facts(kind="sft")
    assert list_keys(sft_then, find_facts("sft.mask=last", kind="sft")) == ["sft.mask"]
    unshuffled_then = find_facts("data.shuffle=false")
    assert list_keys(unshuffled_then, find_facts("data.shuffle=false", "run.seed=1")) == []
    (home / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "3"}\n')
    (contradiction,) = contradictions(then, find_facts(), 4)
    assert (contradiction.key, contradiction.new) == ("data.train.path", "other content")


def test_another_reference_policy_is_refused_where_there_is_one(home: Path) -> None:
    other = copy_model(home, "other")
    (home / "other/model.safetensors").write_bytes(folders.weights("others"))
    assert list_keys(find_facts(), find_facts(other)) == []
    kl = "grpo.loss.kl_coef=0.1"
    assert list_keys(find_facts(kl), find_facts(kl)) == []
    assert list_keys(find_facts(kl), find_facts(kl, other)) == ["model.path"]
    assert list_keys(find_facts(kl), find_facts(kl, "model.random_init=true")) == ["model.path"]
    # A checkpoint of an earlier version has another digest, under another key.
    earlier = {**find_facts(kl), "weights": "of both ends"}
    del earlier["frozen"]
    assert list_keys(earlier, find_facts(kl, other)) == []


def test_no_value_that_may_be_secret_is_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSONA", "hunter2")
    facts = find_facts("data.system_prompt=${oc.env:PERSONA}")
    assert "hunter2" not in json.dumps(facts)
    assert list_keys(facts, find_facts("data.system_prompt=other")) == ["data.system_prompt"]


def test_rows_have_a_digest_that_each_of_them_changes() -> None:
    prompts = [Task("r0", [1, 2], text="", answer="3"), Task("r1", [4], text="", answer=None)]
    digest = digest_rows(prompts)
    assert digest_rows(list(prompts)) == digest
    other_rows = [prompts[::-1], prompts[:1], [replace(prompts[0], answer="4"), prompts[1]]]
    other_rows.append([replace(prompts[0], tokens=[1, 2, 4]), replace(prompts[1], tokens=[])])
    assert digest not in map(digest_rows, other_rows)
    samples = [SupervisedSample("r0", np.array([1, 2], np.int32), np.array([False, True]))]
    assert digest_rows(samples) != digest_rows([replace(samples[0], mask=np.array([True, True]))])
