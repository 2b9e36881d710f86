"""A step's batch carries values and returns to the critic, and its explained variance is measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlctl.grpo.advantages.gae import Gae
from rlctl.grpo.batch import add_column, make_batch
from rlctl.grpo.critic import Critic, explained_variance
from rlctl.grpo.losses.value import ValueLoss
from rlctl.preflight.declared_columns import ADVANTAGE, RETURN, VALUE
from rlctl.training.micro_batching import TrainingSample
from tests.unit.grpo.test_batch import config, make_group

GAE = Gae(gamma=1.0, lam=1.0, whiten=False, bootstrap_cut=False, kl_coef=0.0, kl_estimator="k1")


def test_groups_of_one_with_equal_rewards_are_trained_with_their_returns() -> None:
    groups = [make_group("a", [1.0]), make_group("b", [1.0]), make_group("c", [0.0])]
    section = config(skip=False)
    batch = make_batch(groups, section, GAE)
    assert all(ADVANTAGE.name not in sample.columns for sample in batch.sequences)
    values = [np.full((len(sample), 2), 0.25, np.float32) for sample in batch.sequences]
    batch = add_column(batch, VALUE.name, values, section, GAE)
    assert batch.outcomes.trained == ["a", "b", "c"]
    for sample, reward in zip(batch.sequences, [1.0, 1.0, 0.0], strict=True):
        np.testing.assert_allclose(sample.columns[RETURN.name][sample.mask], reward, atol=1e-6)
        assert not sample.columns[RETURN.name][~sample.mask].any()
        last = sample.columns[ADVANTAGE.name][sample.mask][-1]
        assert last == pytest.approx(reward - 0.25)


def test_a_rollout_with_a_value_that_is_not_finite_is_left_out() -> None:
    section = config(skip=False)
    batch = make_batch([make_group("a", [1.0]), make_group("b", [0.0])], section, GAE)
    values = [np.zeros((len(sample), 2), np.float32) for sample in batch.sequences]
    values[0][-1, 1] = np.nan
    batch = add_column(batch, VALUE.name, values, section, GAE)
    assert [rollout.prompt_id for rollout in batch.left_out] == ["a"] and batch.outcomes.trained == ["b"]


def sample_of(values: list[float], returns: list[float]) -> TrainingSample:
    value = np.stack([np.array([9.0, *values]), np.zeros(len(values) + 1)], -1).astype(np.float32)
    target = np.array([9.0, *returns], np.float32)
    mask = np.arange(len(values) + 1) > 0
    tokens = np.zeros(len(values) + 1, np.int32)
    return TrainingSample(tokens, mask, {VALUE.name: value, RETURN.name: target})


@pytest.mark.parametrize(
    ("values", "share"), [([0.0, 1.0, 0.0, 1.0], 1.0), ([0.5] * 4, 0.0), ([1.0, 0.0, 1.0, 0.0], -3.0)]
)
def test_explained_variance_is_1_for_exact_values_and_0_for_a_constant(values: list[float], share: float) -> None:
    sample = sample_of(values, [0.0, 1.0, 0.0, 1.0])
    assert explained_variance([sample]) == pytest.approx(share)
    half = replace(sample, mask=sample.mask & (np.arange(5) < 3))
    other = replace(sample, mask=sample.mask & (np.arange(5) >= 3))
    assert explained_variance([half, other]) == pytest.approx(share)


class FailingTrainer:
    """A trainer whose second update is not finite."""

    def __init__(self) -> None:
        self.updates = 0

    @contextmanager
    def update(self, loss: ValueLoss) -> Iterator[SimpleNamespace]:
        self.updates += 1
        yield SimpleNamespace(accumulate=lambda samples: None, metrics={})
        if self.updates == 2:
            raise FloatingPointError("the loss is nan; the weights were left as they were")


def test_an_error_of_a_later_update_leaves_a_critic_that_has_moved() -> None:
    """The loop saves no checkpoint then: it would hold the critic of an unfinished step."""
    section = config(skip=False)
    batch = make_batch([make_group("a", [1.0]), make_group("b", [0.0])], section, GAE)
    values = [np.zeros((len(sample), 2), np.float32) for sample in batch.sequences]
    batch = add_column(batch, VALUE.name, values, section, GAE)
    trainer: Any = FailingTrainer()
    options: Any = SimpleNamespace(value_clip=None, updates_per_step=2, warm_up_steps=0)
    critic = Critic(trainer, trainer, options, shares_gpus=False)
    with pytest.raises(FloatingPointError, match="critic: the loss is nan"):
        critic.train(batch)
    assert critic.has_moved


def test_equal_returns_explain_nothing() -> None:
    assert explained_variance([sample_of([0.1, 0.2], [1.0, 1.0])]) is None
    assert explained_variance([]) is None
