"""The residency table: in each phase a kind of state is on the device, on the host or nowhere."""

from itertools import product

import pytest

from rlctl.config.trainer_schema import TrainerSection
from rlctl.preflight.backend import STATES
from rlctl.preflight.load import load
from rlctl.preflight.memory import PHASES, Phase, residency

LOG_PROBS = "trainer.offload_optimizer_for_logprob=true"
GENERATION = "trainer.offload_optimizer_for_generation=true"
ON_HOST = ("trainer.backend=megatron", "trainer.megatron.optimizer_cpu_offload=true")


def load_trainer(*overrides: str) -> TrainerSection:
    return load("sft", None, list(overrides)).config.trainer


def phases_on_host(*overrides: str, shared: bool) -> set[Phase]:
    """Return the phases in which the optimizer state is on the host."""
    table = residency(load_trainer(*overrides), shared)
    return {phase for phase, states in table.items() if states["optimizer"] == "host"}


@pytest.mark.parametrize("shared", [False, True])
def test_without_a_switch_nothing_is_out_and_gradients_live_for_the_update(shared: bool) -> None:
    table = residency(load_trainer(), shared)
    assert tuple(table) == PHASES
    for phase, states in table.items():
        gradients = "device" if phase == "train" else "none"
        assert states == {"parameters": "device", "gradients": gradients, "optimizer": "device"}
        assert tuple(states) == STATES


@pytest.mark.parametrize("shared", [False, True])
def test_out_for_log_probs_alone(shared: bool) -> None:
    assert phases_on_host(LOG_PROBS, shared=shared) == {"log_probs"}


def test_out_for_engines_until_the_update_where_there_are_any() -> None:
    assert phases_on_host(GENERATION, shared=True) == {"generate", "log_probs", "refit", "checkpoint"}
    assert phases_on_host(GENERATION, shared=False) == set()
    assert phases_on_host(LOG_PROBS, GENERATION, shared=False) == {"log_probs"}
    assert phases_on_host(LOG_PROBS, GENERATION, shared=True) == phases_on_host(GENERATION, shared=True)


def test_what_the_host_updates_is_there_at_all_times() -> None:
    for shared, share in product((False, True), ("null", "0.5")):
        part = f"trainer.megatron.optimizer_offload_fraction={share}"
        assert phases_on_host(*ON_HOST, part, shared=shared) == set(PHASES)


@pytest.mark.parametrize(
    ("kind", "overrides", "expected"),
    [
        ("sft", (), ("train", "checkpoint")),
        ("grpo", (), ("generate", "train", "refit", "checkpoint")),
        ("grpo", ("grpo.loss.kl_coef=0.1",), PHASES),
        ("grpo", ("async.enabled=true",), ("train", "refit", "checkpoint")),
        ("grpo", ("async.enabled=true", "grpo.updates_per_step=2"), ("log_probs", "train", "refit", "checkpoint")),
    ],
)
def test_phases_that_a_run_goes_through(kind: str, overrides: tuple[str, ...], expected: tuple[Phase, ...]) -> None:
    assert load(kind, None, list(overrides)).settled.phases == expected
