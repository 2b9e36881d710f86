"""Checks of `lora`, its settled value, and the notes on a learning rate."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.config.errors import ConfigError
from rlctl.preflight.check_adapters import adapter_notes
from rlctl.preflight.load import load
from rlctl.preflight.settled import Settled

_ENGINE = f"{Path(__file__).parents[2] / 'plugins' / 'torch_engine.py'}:KIND"


def settle_run(kind: str, *overrides: str) -> Settled:
    return load(kind, None, list(overrides)).settled


def problems(kind: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        settle_run(kind, *overrides)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_without_the_section_every_weight_is_trained(kind: str) -> None:
    assert settle_run(kind).adapters is None
    assert settle_run(kind, "lora.rank=4", "lora=null").adapters is None


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_adapters_are_settled_with_their_targets_spelled_out(kind: str) -> None:
    adapters = settle_run(kind, "lora.rank=4", "lora.targets=[q_proj, mlp.up_proj]").adapters
    assert adapters and (adapters.rank, adapters.scale, adapters.dropout) == (4, 8.0, 0.0)
    expected_targets = []
    for layer in range(3):
        expected_targets += [f"model.layers.{layer}.self_attn.q_proj", f"model.layers.{layer}.mlp.up_proj"]
    assert [target.name for target in adapters.targets] == expected_targets


def test_the_recipe_that_validates_a_run_samples_with_its_adapters() -> None:
    run = settle_run("sft", "lora={}", "validation.recipe=grpo-tiny")
    assert run.sampling and run.sampling.adapters == run.adapters is not None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.backend=megatron"], "lora: needs trainer.backend=fsdp: megatron trains every weight; set lora=null"),
        (["lora.dropout=0.1"], "lora.dropout=0.1: must be 0 in GRPO, whose engines sample without dropout"),
        ([f"generation.engine={_ENGINE}"], f"lora: needs generation.engine=vllm: {_ENGINE} serves no adapters"),
        (["refit.checksum=sampled"], "refit.checksum=sampled: must be all or auto with lora"),
        (["lora.targets=[q_prj]"], "=[q_prj]: q_prj: no linear layer of the model has this name; did you mean q_proj?"),
        (["lora.targets=[lm_head]"], "=[lm_head]: lm_head is the output: it and the embedding"),
        (["lora.targets=linear"], "must be a list, or one of all, attention, mlp, not 'linear'"),
    ],
)
def test_a_wrong_section_is_refused_in_one_line(overrides: list[str], expected: str) -> None:
    lines = [line for line in problems("grpo", "lora={}", *overrides) if "lora" in line]
    assert len(lines) == 1
    assert expected in lines[0]


def test_sft_may_have_dropout() -> None:
    adapters = settle_run("sft", "lora.dropout=0.1").adapters
    assert adapters and adapters.dropout == 0.1


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["lora={}", "trainer.optimizer.lr=1e-6"], ["trainer.optimizer.lr=1e-06: low for lora"]),
        (["lora={}", "trainer.optimizer.lr=1e-5"], []),
        (["trainer.optimizer.lr=1e-6"], []),
        (["trainer.optimizer.lr=2e-4"], ["trainer.optimizer.lr=0.0002: high without lora"]),
    ],
)
def test_an_unusual_rate_is_noted(overrides: list[str], expected: list[str]) -> None:
    run = settle_run("grpo", *overrides)
    assert run.facts and list(adapter_notes(run)) == [], "tiny models learn at high rates"
    large = replace(run, facts=replace(run.facts, parameters=10**9))
    notes = list(adapter_notes(large))
    assert len(notes) == len(expected) and all(note.startswith(words) for note, words in zip(notes, expected))
