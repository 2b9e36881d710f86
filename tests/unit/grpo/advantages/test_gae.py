"""GAE equals its published recursion token by token, over turns, with cut rollouts and with the KL in the reward."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.grpo.advantages.base import ScoredRollouts, token_advantages
from rlctl.grpo.advantages.gae import Gae
from rlctl.preflight.declared_columns import REFERENCE_LOG_PROB, RETURN, ROLLOUT_LOG_PROB, VALUE
from tests.scored import columns

PLAIN = Gae(gamma=1.0, lam=1.0, whiten=False, bootstrap_cut=False, kl_coef=0.0, kl_estimator="k1")


def make_rollouts(lengths: list[int], seed: int, is_cut: bool = False) -> ScoredRollouts:
    """Return rollouts with random rewards, values and log-probs. Every second token begins another turn."""
    rng = np.random.default_rng(seed)
    rollouts = columns(
        rng.integers(0, 2, len(lengths)).astype(float).tolist(),
        list(range(len(lengths))),
        turns=[[token // 2 for token in range(length)] for length in lengths],
    )
    numbers = {
        name: [rng.normal(size=(length, *shape)).astype(np.float32) for length in lengths]
        for name, shape in {VALUE.name: (2,), ROLLOUT_LOG_PROB.name: (), REFERENCE_LOG_PROB.name: ()}.items()
    }
    return replace(rollouts, columns=numbers, is_cut=np.full(len(lengths), is_cut))


def expected_advantages(advantage: Gae, rollouts: ScoredRollouts, row: int) -> list[float]:
    """Return A_t = sum over k of (gamma lam)^k d_{t+k} of a rollout, from the definition."""
    values = rollouts.columns[VALUE.name][row].astype(np.float64)
    count = len(values)
    rewards = [0.0] * count
    for token in range(count):
        x = float(rollouts.columns[REFERENCE_LOG_PROB.name][row][token])
        x -= float(rollouts.columns[ROLLOUT_LOG_PROB.name][row][token])
        estimate = {"k1": -x, "k2": x * x / 2, "k3": np.exp(x) - 1 - x}[advantage.kl_estimator]
        rewards[token] -= advantage.kl_coef * estimate
    rewards[-1] += float(rollouts.reward[row])
    end = values[-1, 1] if advantage.bootstrap_cut and rollouts.is_cut[row] else 0.0
    nexts = [*values[1:, 0], end]
    deltas = [rewards[t] + advantage.gamma * nexts[t] - values[t, 0] for t in range(count)]
    discount = advantage.gamma * advantage.lam
    return [sum(discount ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 999),
    st.sampled_from([(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0)]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(0.0, "k1"), (0.1, "k1"), (0.1, "k2"), (0.1, "k3")]),
)
def test_advantages_and_returns_are_those_of_the_definition(
    lengths: list[int], seed: int, rates: tuple[float, float], bootstraps: bool, is_cut: bool, kl: tuple[float, str]
) -> None:
    gamma, lam = rates
    coef, estimator = kl
    advantage = replace(
        PLAIN,
        gamma=gamma,
        lam=lam,
        bootstrap_cut=bootstraps,
        kl_coef=coef,
        kl_estimator=estimator,  # type: ignore[arg-type]
    )
    rollouts = make_rollouts(lengths, seed, is_cut)
    advantages = token_advantages(advantage, rollouts)
    returns = advantage.learned_columns(rollouts)[RETURN.name]
    for row in range(len(lengths)):
        expected = np.array(expected_advantages(advantage, rollouts, row))
        np.testing.assert_allclose(advantages[row], expected, atol=1e-5, rtol=1e-6)
        np.testing.assert_allclose(returns[row], expected + rollouts.columns[VALUE.name][row][:, 0], atol=1e-10)


def test_with_gamma_and_lambda_of_1_a_return_is_the_reward() -> None:
    rollouts = make_rollouts([3, 7, 1], seed=0)
    for row, returns in enumerate(PLAIN.learned_columns(rollouts)[RETURN.name]):
        np.testing.assert_allclose(returns, rollouts.reward[row], atol=1e-12)


def test_whitened_advantages_have_mean_0_and_variance_1_and_leave_the_returns() -> None:
    rollouts = make_rollouts([3, 7, 1, 5], seed=1)
    whitened = replace(PLAIN, whiten=True)
    numbers = np.concatenate(token_advantages(whitened, rollouts))
    assert numbers.mean() == pytest.approx(0, abs=1e-6) and numbers.var(ddof=1) == pytest.approx(1, abs=1e-6)
    plain = np.concatenate(token_advantages(PLAIN, rollouts))
    scale = 1 / np.sqrt(plain.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(numbers, (plain - plain.mean()) * scale, atol=1e-6)
    for row, other in zip(*(kind.learned_columns(rollouts)[RETURN.name] for kind in (PLAIN, whitened))):
        np.testing.assert_array_equal(row, other)


@pytest.mark.parametrize("whiten", [False, True])
def test_the_order_of_rollouts_changes_no_bit(whiten: bool) -> None:
    rollouts = make_rollouts([4, 2, 6], seed=2)
    advantage = replace(PLAIN, whiten=whiten)
    order = np.array([2, 0, 1])
    for row, other in zip(token_advantages(advantage, rollouts.select(order)), order):
        np.testing.assert_array_equal(row, token_advantages(advantage, rollouts)[other])


def test_without_kl_only_the_values_are_read() -> None:
    assert PLAIN.columns == ("value",)
    assert replace(PLAIN, kl_coef=0.1).columns == ("value", "rollout_log_prob", "reference_log_prob")


def test_one_token_alone_is_not_whitened() -> None:
    rollouts = make_rollouts([1], seed=3)
    value = float(rollouts.columns[VALUE.name][0][0, 0])
    [advantages] = token_advantages(replace(PLAIN, whiten=True), rollouts)
    assert advantages[0] == pytest.approx(float(rollouts.reward[0]) - value)
