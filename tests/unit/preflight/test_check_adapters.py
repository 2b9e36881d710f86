"""Checks of `lora`, its settled value, and the notes on a learning rate."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.config.errors import ConfigError
from rlctl.preflight.check_adapters import adapter_notes
from rlctl.preflight.load import load
from rlctl.preflight.settled import Settled

_ENGINE = f"{Path(__file__).parents[2] / 'plugins' / 'torch_engine.py'}:KIND"


def settled(kind: str, *overrides: str) -> Settled:
    return load(kind, None, list(overrides)).settled


def problems(kind: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        settled(kind, *overrides)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_without_the_section_every_weight_is_trained(kind: str) -> None:
    assert settled(kind).adapters is None
    assert settled(kind, "lora.rank=4", "lora=null").adapters is None


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_adapters_are_settled_with_their_targets_spelled_out(kind: str) -> None:
    found = settled(kind, "lora.rank=4", "lora.targets=[q_proj, mlp.up_proj]").adapters
    assert found and (found.rank, found.scale, found.dropout) == (4, 8.0, 0.0)
    layers = 3
    names = ("self_attn.q_proj", "mlp.up_proj")
    assert [each.name for each in found.targets] == [
        f"model.layers.{i}.{name}" for i in range(layers) for name in names
    ]


def test_the_recipe_that_validates_a_run_samples_with_its_adapters() -> None:
    run = settled("sft", "lora={}", "validation.recipe=grpo-tiny")
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
    [line] = [line for line in problems("grpo", "lora={}", *overrides) if "lora" in line]
    assert expected in line


def test_sft_may_have_dropout() -> None:
    found = settled("sft", "lora.dropout=0.1").adapters
    assert found and found.dropout == 0.1


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
    run = settled("grpo", *overrides)
    assert run.facts and list(adapter_notes(run)) == [], "tiny models learn at high rates"
    large = replace(run, facts=replace(run.facts, parameters=10**9))
    found = list(adapter_notes(large))
    assert len(found) == len(expected) and all(line.startswith(words) for line, words in zip(found, expected))
