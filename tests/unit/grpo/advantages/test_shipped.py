"""Every advantage of rlctl equals its formula in plain Python, for any order of rollouts and any group sizes."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.config.fields import keys_of, literals, sections_of
from rlctl.config.plugins import ADVANTAGES
from rlctl.grpo.advantages.base import Advantage
from rlctl.grpo.advantages.batch_normalized import BatchNormalized
from rlctl.grpo.advantages.gae import Gae
from rlctl.grpo.advantages.gdpo import Gdpo
from rlctl.grpo.advantages.group_mean import GroupMean
from rlctl.grpo.advantages.leave_one_out import LeaveOneOut
from rlctl.grpo.advantages.pass_at_k import PassAtK
from rlctl.grpo.advantages.quantile import QuantileBaseline
from rlctl.grpo.advantages.sections import AnyAdvantageSection
from rlctl.utils.user_code import load_object
from tests.scored import columns, first_tokens

WEIGHTS = {"exact": 1.0, "brevity": -0.25}
PLAIN = GroupMean(False)
STD = GroupMean(True)
LOO = LeaveOneOut(False)
LOO_STD = LeaveOneOut(True)
# Added to every standard deviation before it divides.
EPSILON = 1e-6


@dataclass(frozen=True)
class ToyRollout:
    """A rollout whose reward is the weighted sum of two rewards, exact and brevity."""

    group: int
    exact: float
    brevity: float
    tokens: int

    @property
    def reward(self) -> float:
        return sum(weight * getattr(self, name) for name, weight in WEIGHTS.items())

    @property
    def right(self) -> bool:
        return self.exact >= 1


def make_columns(step: list[ToyRollout]) -> Any:
    """Return the `ScoredRollouts` of a step."""
    return columns(
        [rollout.reward for rollout in step],
        [rollout.group for rollout in step],
        {name: [getattr(rollout, name) for rollout in step] for name in WEIGHTS},
        WEIGHTS,
        [rollout.right for rollout in step],
        [[0] * rollout.tokens for rollout in step],
    )


def list_group(step: list[ToyRollout], rollout: ToyRollout) -> list[ToyRollout]:
    """Return all rollouts in the group of `rollout`."""
    return [member for member in step if member.group == rollout.group]


def group_mean(step: list[ToyRollout], rollout: ToyRollout, normalize: bool = False) -> float:
    rewards = [member.reward for member in list_group(step, rollout)]
    if len(set(rewards)) == 1:
        return 0.0
    divisor = statistics.stdev(rewards) + EPSILON if normalize else 1
    return (rollout.reward - statistics.fmean(rewards)) / divisor


def leave_one_out(step: list[ToyRollout], rollout: ToyRollout, normalize: bool = False) -> float:
    group = list_group(step, rollout)
    rewards = [member.reward for member in group]
    other_rewards = [member.reward for member in group if member is not rollout]
    if len(set(rewards)) == 1:
        return 0.0
    divisor = statistics.stdev(rewards) + EPSILON if normalize else 1
    return (rollout.reward - statistics.fmean(other_rewards)) / divisor


def batch_normalize(step: list[ToyRollout], rollout: ToyRollout, has_baseline: bool) -> float:
    def subtract_baseline(scored: ToyRollout) -> float:
        if not has_baseline:
            return scored.reward
        return scored.reward - statistics.fmean(member.reward for member in list_group(step, scored))

    token_rewards: list[float] = []
    for scored in step:
        token_rewards += [subtract_baseline(scored)] * scored.tokens
    deviation = statistics.stdev(token_rewards) if len(token_rewards) > 1 else 0.0
    return (subtract_baseline(rollout) - statistics.fmean(token_rewards)) / (deviation + EPSILON)


def gdpo(step: list[ToyRollout], rollout: ToyRollout) -> float:
    def sum_scores(scored: ToyRollout) -> float:
        total = 0.0
        for name, weight in WEIGHTS.items():
            rewards = [getattr(member, name) for member in list_group(step, scored)]
            if len(set(rewards)) > 1:
                difference = getattr(scored, name) - statistics.fmean(rewards)
                total += weight * difference / (statistics.stdev(rewards) + EPSILON)
        return total

    totals = [sum_scores(scored) for scored in step]
    deviation = statistics.stdev(totals) if len(step) > 1 else 0
    return (sum_scores(rollout) - statistics.fmean(totals)) / (deviation + EPSILON)


def quantile(step: list[ToyRollout], rollout: ToyRollout, share: float) -> float:
    rewards = [member.reward for member in list_group(step, rollout)]
    if len(set(rewards)) == 1:
        return 0.0
    reaching = [bound for bound in rewards if sum(reward <= bound for reward in rewards) / len(rewards) >= share]
    return (rollout.reward - min(reaching)) / (statistics.stdev(rewards) + EPSILON)


def pass_at_k(step: list[ToyRollout], rollout: ToyRollout, k: int) -> float:
    """Return the advantage by enumeration: a subset of k earns 1 if a member is right, a rollout its subsets' mean."""
    group = list_group(step, rollout)
    if len(group) <= k:
        return 0.0
    worth: dict[tuple[int, ...], float] = {}
    for subset in combinations(range(len(group)), k):
        worth[subset] = float(any(group[place].right for place in subset))
    own_place = next(place for place, member in enumerate(group) if member is rollout)
    own_worth = statistics.fmean(value for subset, value in worth.items() if own_place in subset)
    return (own_worth - statistics.fmean(worth.values())) / (statistics.pstdev(worth.values()) + EPSILON)


REFERENCES: dict[Advantage, Callable[[list[ToyRollout], ToyRollout], float]] = {
    PLAIN: group_mean,
    STD: partial(group_mean, normalize=True),
    LOO: leave_one_out,
    LOO_STD: partial(leave_one_out, normalize=True),
    BatchNormalized("none"): partial(batch_normalize, has_baseline=False),
    BatchNormalized("group_mean"): partial(batch_normalize, has_baseline=True),
    Gdpo(): gdpo,
    QuantileBaseline(0.4): partial(quantile, share=0.4),
    QuantileBaseline(0.7): partial(quantile, share=0.7),
    PassAtK(1): partial(pass_at_k, k=1),
    PassAtK(3): partial(pass_at_k, k=3),
}
ALL = list(REFERENCES)
OF_GROUPS = [advantage for advantage in ALL if advantage.scope == "group"]
NOT_PASS_AT_K = [advantage for advantage in ALL if not isinstance(advantage, PassAtK)]
with_every_advantage = pytest.mark.parametrize("advantage", ALL, ids=str)
with_every_group_advantage = pytest.mark.parametrize("advantage", OF_GROUPS, ids=str)
# Rewards are multiples of 1/8, whose sums and differences are exact. So equal rewards are equal in the references too.
eighths = st.integers(-32, 32).map(lambda number: number / 8)
exact_rewards = st.sampled_from([0.0, 0.5, 1.0]) | eighths
toy_rollouts = st.builds(ToyRollout, st.integers(-2, 2), exact_rewards, eighths, st.integers(1, 4))
steps = st.lists(toy_rollouts, min_size=1, max_size=16)


def test_every_name_has_a_reference_here_and_the_scope_that_the_config_knows() -> None:
    classes = {name: load_object(location) for name, location in ADVANTAGES.items()}
    # Gae reads a critic's values, see test_gae.py.
    assert {type(advantage) for advantage in ALL} == set(classes.values()) - {Gae}
    expected_scopes = {}
    for section in sections_of(AnyAdvantageSection)[:-1]:
        name = literals(keys_of(section)["name"].type)[0]
        expected_scopes[name] = section.scope
    assert {name: kind.scope for name, kind in classes.items()} == expected_scopes


@with_every_advantage
@settings(max_examples=60)
@given(steps)
def test_equals_the_definition_to_a_millionth(advantage: Advantage, step: list[ToyRollout]) -> None:
    expected = [REFERENCES[advantage](step, rollout) for rollout in step]
    advantages = advantage(make_columns(step))
    np.testing.assert_allclose(np.array([*advantages], np.float64), expected, rtol=1e-6, atol=1e-6)


@with_every_advantage
@settings(max_examples=30)
@given(steps, st.randoms())
def test_the_order_of_rollouts_changes_no_bit(advantage: Advantage, step: list[ToyRollout], random: Any) -> None:
    order = random.sample(range(len(step)), len(step))
    shuffled = first_tokens(advantage, make_columns([step[i] for i in order]))
    np.testing.assert_array_equal(shuffled, first_tokens(advantage, make_columns(step))[order])


@with_every_group_advantage
@settings(max_examples=30)
@given(steps, steps)
def test_one_groups_rewards_do_not_touch_another_group(
    advantage: Advantage, first: list[ToyRollout], second: list[ToyRollout]
) -> None:
    second = [replace(rollout, group=rollout.group + 100) for rollout in second]
    together = first_tokens(advantage, make_columns(first + second))
    np.testing.assert_array_equal(together[: len(first)], first_tokens(advantage, make_columns(first)))
    np.testing.assert_array_equal(together[len(first) :], first_tokens(advantage, make_columns(second)))


@with_every_advantage
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e8 + 0.1, -7.3])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_a_step_of_one_uniform_group_gets_exactly_zero(advantage: Advantage, reward: float, size: int) -> None:
    assert not first_tokens(advantage, make_columns([ToyRollout(0, reward, 0.3, 2)] * size)).any()


@with_every_group_advantage
def test_a_uniform_group_beside_others_gets_exactly_zero(advantage: Advantage) -> None:
    uniform = [ToyRollout(0, 0.1, 0.3, 2)] * 7
    mixed = [ToyRollout(1, float(index % 2), 0.0, 1) for index in range(6)]
    single = ToyRollout(2, 1.0, 1.0, 1)
    advantages = first_tokens(advantage, make_columns([*uniform, *mixed, single]))
    assert not advantages[:7].any() and advantages[7:13].any() and not advantages[13]


@pytest.mark.parametrize("advantage", NOT_PASS_AT_K, ids=str)
def test_a_group_equal_but_for_rounding_does_not_explode(advantage: Advantage) -> None:
    rewards = [0.1 + 0.2, 0.3, 0.3]
    advantages = first_tokens(advantage, columns(rewards, [0, 0, 0], {"exact": rewards}, {"exact": 1}))
    # Gdpo divides twice by a deviation near 0, so its advantages may be larger.
    assert np.abs(advantages).max() < (1e-4 if isinstance(advantage, Gdpo) else 1e-9)


@with_every_advantage
def test_no_rollouts_have_no_advantages(advantage: Advantage) -> None:
    assert first_tokens(advantage, make_columns([])).shape == (0,)


def test_worked_example_with_groups_of_unequal_size() -> None:
    rollouts = columns([1.0, 0.0, 0.0, 1.0, 0.0], [7, 7, 7, 4, 4])
    np.testing.assert_allclose(first_tokens(PLAIN, rollouts), [2 / 3, -1 / 3, -1 / 3, 1 / 2, -1 / 2])
    np.testing.assert_allclose(first_tokens(LOO, rollouts), [1, -1 / 2, -1 / 2, 1, -1])


def test_std_is_the_sample_standard_deviation_plus_a_millionth() -> None:
    std = 2**0.5 + EPSILON
    rollouts = columns([0.0, 2.0], [0, 0])
    np.testing.assert_allclose(first_tokens(STD, rollouts), [-1 / std, 1 / std], rtol=1e-6)
    np.testing.assert_allclose(first_tokens(LOO_STD, rollouts), [-2 / std, 2 / std], rtol=1e-6)


def test_the_same_prompt_drawn_twice_is_two_groups() -> None:
    """Groups with equal prompts, and even equal rewards, are not merged, because only the group's number counts."""
    rewards = [1.0, 0.0, 1.0, 1.0]
    np.testing.assert_allclose(first_tokens(PLAIN, columns(rewards, [0, 0, 1, 1])), [0.5, -0.5, 0.0, 0.0])
    np.testing.assert_allclose(first_tokens(PLAIN, columns(rewards, [0, 0, 0, 0])), [0.25, -0.75, 0.25, 0.25])


@given(steps)
def test_batch_normalised_advantages_of_the_steps_tokens_have_mean_zero_and_variance_one(
    step: list[ToyRollout],
) -> None:
    rollouts = make_columns(step)
    counts = [rollout.tokens for rollout in step]
    groups = rollouts.by_group(rollouts.reward)
    for baseline, values in (("none", rollouts.reward), ("group_mean", groups.by_row(groups.centred))):
        worth = BatchNormalized(baseline)(rollouts)  # type: ignore[arg-type]
        tokens = np.repeat(worth, counts)
        assert abs(tokens.sum()) < 1e-6 * len(tokens)
        if worth.any():
            # The advantage divides by the deviation plus 1e-6.
            deviation = np.repeat(values, counts).std(ddof=1)
            assert math.isclose(tokens.var(ddof=1), (deviation / (deviation + 1e-6)) ** 2, rel_tol=1e-4)


@given(steps)
def test_gdpo_has_mean_zero_and_variance_one_over_the_rollouts(step: list[ToyRollout]) -> None:
    worth = Gdpo()(make_columns(step))
    assert abs(worth.sum()) < 1e-6 * len(step)
    if worth.any():
        assert math.isclose(worth.var(ddof=1), 1.0, rel_tol=1e-4)


def test_gdpo_keeps_apart_what_the_sum_of_rewards_makes_equal() -> None:
    """Take the example of arXiv 2601.05242, section 3.1: rewards (1, 1, 0) and (0, 0, 1), whose sums are (1, 1, 1)."""
    parts = {"exact": [1.0, 1.0, 0.0], "form": [0.0, 0.0, 1.0]}
    rollouts = columns([1.0] * 3, [0] * 3, parts, {"exact": 2.0, "form": 1.0})
    assert not first_tokens(STD, rollouts).any()
    worth = first_tokens(Gdpo(), rollouts)
    assert worth[0] == worth[1] > 0 > worth[2]


@pytest.mark.parametrize(("right", "learns"), [(1, "right"), (6, "right"), (7, "wrong"), (9, "wrong")])
def test_a_quantile_of_0_4_learns_from_rare_successes_or_from_rare_failures(right: int, learns: str) -> None:
    """Check arXiv 2509.22611, equation 4: the baseline is 0 if at most 0.6 of the answers are right, otherwise 1."""
    rewards = [1.0] * right + [0.0] * (10 - right)
    worth = first_tokens(QuantileBaseline(0.4), columns(rewards, [0] * 10))
    if learns == "right":
        assert (worth[:right] > 0).all() and not worth[right:].any()
    else:
        assert not worth[:right].any() and (worth[right:] < 0).all()


@given(st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size), st.integers(1, 99))))
def test_the_quantiles_rank_is_right_where_the_product_is_rounded(sizes: tuple[int, int, int]) -> None:
    size, part, percent = sizes
    rewards = list(map(float, range(size)))
    for share in {part / size, percent / 100} - {1.0}:
        worth = QuantileBaseline(share)(columns(rewards, [0] * size))
        rank = next(rank for rank in range(1, size + 1) if rank / size >= share)
        assert [*worth].index(0.0) == rank - 1


def test_pass_at_1_is_the_mean_baseline_and_pass_at_k_rewards_the_rare_success_more() -> None:
    right = [True] + [False] * 7
    rollouts = columns(list(map(float, right)), [0] * 8, right=right)
    deviation = math.sqrt(1 / 8 * 7 / 8) + 1e-6
    np.testing.assert_allclose(first_tokens(PassAtK(1), rollouts), first_tokens(PLAIN, rollouts) / deviation, rtol=1e-6)
    often = columns([1.0] * 7 + [0.0], [0] * 8, right=[True] * 7 + [False])
    # Only one rollout is wrong, so every pair contains a right one, and all advantages are 0.
    assert not first_tokens(PassAtK(2), often).any()
    rare = [first_tokens(PassAtK(k), rollouts) for k in (1, 4)]
    assert rare[1][1] > rare[0][1]


def test_pass_at_k_counts_what_is_right_whatever_else_is_rewarded() -> None:
    right = [True, False, False, True]
    rewarded_if_right = columns([1.0, 0, 0, 1], [0] * 4, right=right)
    rewarded_otherwise = columns([0.2, 0.9, -3, 0.1], [0] * 4, right=right)
    advantages = first_tokens(PassAtK(2), rewarded_if_right)
    np.testing.assert_array_equal(advantages, first_tokens(PassAtK(2), rewarded_otherwise))
