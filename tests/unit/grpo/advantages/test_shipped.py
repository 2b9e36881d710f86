"""Every advantage of rlctl equals its definition in plain Python, for any order, groups and sizes."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
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
from rlctl.grpo.advantages.gdpo import Gdpo
from rlctl.grpo.advantages.group_mean import GroupMean
from rlctl.grpo.advantages.leave_one_out import LeaveOneOut
from rlctl.grpo.advantages.pass_at_k import PassAtK
from rlctl.grpo.advantages.quantile import QuantileBaseline
from rlctl.grpo.advantages.sections import AnyAdvantageSection
from rlctl.utils.user_code import load_object
from tests.scored import columns, first_tokens

WEIGHTS = {"exact": 1.0, "brevity": -0.25}
PLAIN, STD, LOO, LOO_STD = GroupMean(False), GroupMean(True), LeaveOneOut(False), LeaveOneOut(True)


@dataclass(frozen=True)
class One:
    """A rollout. Its reward is the weighted sum of two."""

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


def of(rollouts: list[One]) -> Any:
    return columns(
        [one.reward for one in rollouts],
        [one.group for one in rollouts],
        {name: [getattr(one, name) for one in rollouts] for name in WEIGHTS},
        WEIGHTS,
        [one.right for one in rollouts],
        [[0] * one.tokens for one in rollouts],
    )


def group_mean(step: list[One], own: One, normalize: bool = False) -> float:
    rewards = [one.reward for one in step if one.group == own.group]
    if len(set(rewards)) == 1:
        return 0.0
    return (own.reward - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6 if normalize else 1)


def leave_one_out(step: list[One], own: One, normalize: bool = False) -> float:
    rewards = [one.reward for one in step if one.group == own.group]
    others = [one.reward for one in step if one.group == own.group and one is not own]
    if len(set(rewards)) == 1:
        return 0.0
    return (own.reward - statistics.fmean(others)) / (statistics.stdev(rewards) + 1e-6 if normalize else 1)


def batch_normalize(step: list[One], own: One, baseline: bool) -> float:
    def centred(one: One) -> float:
        return one.reward - (statistics.fmean(each.reward for each in step if each.group == one.group) * baseline)

    tokens = [centred(one) for one in step for _ in range(one.tokens)]
    spread = statistics.stdev(tokens) if len(tokens) > 1 else 0.0
    return (centred(own) - statistics.fmean(tokens)) / (spread + 1e-6)


def gdpo(step: list[One], own: One) -> float:
    def total(one: One) -> float:
        result = 0.0
        for name, weight in WEIGHTS.items():
            values = [getattr(each, name) for each in step if each.group == one.group]
            if len(set(values)) > 1:
                score = (getattr(one, name) - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6)
                result += weight * score
        return result

    totals = [total(one) for one in step]
    return (total(own) - statistics.fmean(totals)) / ((statistics.stdev(totals) if len(step) > 1 else 0) + 1e-6)


def quantile(step: list[One], own: One, share: float) -> float:
    rewards = [one.reward for one in step if one.group == own.group]
    if len(set(rewards)) == 1:
        return 0.0
    baseline = min(x for x in rewards if sum(y <= x for y in rewards) / len(rewards) >= share)
    return (own.reward - baseline) / (statistics.stdev(rewards) + 1e-6)


def pass_at_k(step: list[One], own: One, k: int) -> float:
    """By counting subsets: each is worth 1 if one member is right, and a rollout the mean of its subsets."""
    group = [one for one in step if one.group == own.group]
    if len(group) <= k:
        return 0.0
    worth = {subset: float(any(group[i].right for i in subset)) for subset in combinations(range(len(group)), k)}
    place = next(i for i, one in enumerate(group) if one is own)
    mine = statistics.fmean(value for subset, value in worth.items() if place in subset)
    return (mine - statistics.fmean(worth.values())) / (statistics.pstdev(worth.values()) + 1e-6)


REFERENCES: dict[Advantage, Callable[[list[One], One], float]] = {
    PLAIN: group_mean,
    STD: lambda step, own: group_mean(step, own, normalize=True),
    LOO: leave_one_out,
    LOO_STD: lambda step, own: leave_one_out(step, own, normalize=True),
    BatchNormalized("none"): lambda step, own: batch_normalize(step, own, baseline=False),
    BatchNormalized("group_mean"): lambda step, own: batch_normalize(step, own, baseline=True),
    Gdpo(): gdpo,
    QuantileBaseline(0.4): lambda step, own: quantile(step, own, 0.4),
    QuantileBaseline(0.7): lambda step, own: quantile(step, own, 0.7),
    PassAtK(1): lambda step, own: pass_at_k(step, own, 1),
    PassAtK(3): lambda step, own: pass_at_k(step, own, 3),
}
ALL = list(REFERENCES)
every = pytest.mark.parametrize("advantage", ALL, ids=str)
of_groups = pytest.mark.parametrize("advantage", [each for each in ALL if each.scope == "group"], ids=str)
# Eighths: sums and differences of rewards are exact, so that equal ones are equal in the references too.
eighths = st.integers(-32, 32).map(lambda k: k / 8)
ones = st.builds(One, st.integers(-2, 2), st.sampled_from([0.0, 0.5, 1.0]) | eighths, eighths, st.integers(1, 4))
steps = st.lists(ones, min_size=1, max_size=16)


def test_every_name_has_a_reference_here_and_the_scope_that_the_config_knows() -> None:
    kinds = {name: load_object(where) for name, where in ADVANTAGES.items()}
    assert {type(each) for each in ALL} == set(kinds.values())
    scopes = {literals(keys_of(each)["name"].type)[0]: each.scope for each in sections_of(AnyAdvantageSection)[:-1]}
    assert {name: kind.scope for name, kind in kinds.items()} == scopes


@every
@settings(max_examples=60)
@given(steps)
def test_equals_the_definition_to_a_millionth(advantage: Advantage, step: list[One]) -> None:
    expected = [REFERENCES[advantage](step, own) for own in step]
    found = advantage(of(step))
    np.testing.assert_allclose(np.array([*found], np.float64), expected, rtol=1e-6, atol=1e-6)


@every
@settings(max_examples=30)
@given(steps, st.randoms())
def test_the_order_of_rollouts_changes_no_bit(advantage: Advantage, step: list[One], random: Any) -> None:
    order = random.sample(range(len(step)), len(step))
    shuffled = first_tokens(advantage, of([step[i] for i in order]))
    np.testing.assert_array_equal(shuffled, first_tokens(advantage, of(step))[order])


@of_groups
@settings(max_examples=30)
@given(steps, steps)
def test_one_groups_rewards_do_not_touch_another_group(
    advantage: Advantage, first: list[One], second: list[One]
) -> None:
    second = [One(one.group + 100, one.exact, one.brevity, one.tokens) for one in second]
    together = first_tokens(advantage, of(first + second))
    np.testing.assert_array_equal(together[: len(first)], first_tokens(advantage, of(first)))
    np.testing.assert_array_equal(together[len(first) :], first_tokens(advantage, of(second)))


@every
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e8 + 0.1, -7.3])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_a_step_of_one_uniform_group_gets_exactly_zero(advantage: Advantage, reward: float, size: int) -> None:
    assert not first_tokens(advantage, of([One(0, reward, 0.3, 2)] * size)).any()


@of_groups
def test_a_uniform_group_beside_others_gets_exactly_zero(advantage: Advantage) -> None:
    step = [One(0, 0.1, 0.3, 2)] * 7 + [One(1, float(i % 2), 0.0, 1) for i in range(6)] + [One(2, 1.0, 1.0, 1)]
    found = first_tokens(advantage, of(step))
    assert not found[:7].any() and found[7:13].any() and not found[13]


@pytest.mark.parametrize("advantage", [each for each in ALL if not isinstance(each, PassAtK)], ids=str)
def test_a_group_equal_but_for_rounding_does_not_explode(advantage: Advantage) -> None:
    rewards = [0.1 + 0.2, 0.3, 0.3]
    found = first_tokens(advantage, columns(rewards, [0, 0, 0], {"exact": rewards}, {"exact": 1}))
    # Two divisions by a deviation near 0.
    assert np.abs(found).max() < (1e-4 if isinstance(advantage, Gdpo) else 1e-9)


@every
def test_no_rollouts_have_no_advantages(advantage: Advantage) -> None:
    assert first_tokens(advantage, of([])).shape == (0,)


def test_worked_example_with_groups_of_unequal_size() -> None:
    rollouts = columns([1.0, 0.0, 0.0, 1.0, 0.0], [7, 7, 7, 4, 4])
    np.testing.assert_allclose(first_tokens(PLAIN, rollouts), [2 / 3, -1 / 3, -1 / 3, 1 / 2, -1 / 2])
    np.testing.assert_allclose(first_tokens(LOO, rollouts), [1, -1 / 2, -1 / 2, 1, -1])


def test_std_is_the_sample_standard_deviation_plus_a_millionth() -> None:
    std, rollouts = 2**0.5 + 1e-6, columns([0.0, 2.0], [0, 0])
    np.testing.assert_allclose(first_tokens(STD, rollouts), [-1 / std, 1 / std], rtol=1e-6)
    np.testing.assert_allclose(first_tokens(LOO_STD, rollouts), [-2 / std, 2 / std], rtol=1e-6)


def test_the_same_prompt_drawn_twice_is_two_groups() -> None:
    """Equal prompts, and even equal rewards in them, do not merge: only the identity counts."""
    rewards = [1.0, 0.0, 1.0, 1.0]
    np.testing.assert_allclose(first_tokens(PLAIN, columns(rewards, [0, 0, 1, 1])), [0.5, -0.5, 0.0, 0.0])
    np.testing.assert_allclose(first_tokens(PLAIN, columns(rewards, [0, 0, 0, 0])), [0.25, -0.75, 0.25, 0.25])


@given(steps)
def test_batch_normalised_advantages_of_the_steps_tokens_have_mean_zero_and_variance_one(step: list[One]) -> None:
    rollouts, counts = of(step), [one.tokens for one in step]
    groups = rollouts.by_group(rollouts.reward)
    for baseline, values in (("none", rollouts.reward), ("group_mean", groups.by_row(groups.centred))):
        worth = BatchNormalized(baseline)(rollouts)  # type: ignore[arg-type]
        tokens = np.repeat(worth, counts)
        assert abs(tokens.sum()) < 1e-6 * len(tokens)
        if worth.any():
            # A millionth is added to the deviation.
            deviation = np.repeat(values, counts).std(ddof=1)
            assert math.isclose(tokens.var(ddof=1), (deviation / (deviation + 1e-6)) ** 2, rel_tol=1e-4)


@given(steps)
def test_gdpo_has_mean_zero_and_variance_one_over_the_rollouts(step: list[One]) -> None:
    worth = Gdpo()(of(step))
    assert abs(worth.sum()) < 1e-6 * len(step)
    if worth.any():
        assert math.isclose(worth.var(ddof=1), 1.0, rel_tol=1e-4)


def test_gdpo_keeps_apart_what_the_sum_of_rewards_makes_equal() -> None:
    """The example of arXiv 2601.05242, section 3.1: sums (1, 1, 1) of rewards (1, 1, 0) and (0, 0, 1)."""
    parts = {"exact": [1.0, 1.0, 0.0], "form": [0.0, 0.0, 1.0]}
    rollouts = columns([1.0] * 3, [0] * 3, parts, {"exact": 2.0, "form": 1.0})
    assert not first_tokens(STD, rollouts).any()
    worth = first_tokens(Gdpo(), rollouts)
    assert worth[0] == worth[1] > 0 > worth[2]


@pytest.mark.parametrize(("right", "learns"), [(1, "right"), (6, "right"), (7, "wrong"), (9, "wrong")])
def test_a_quantile_of_0_4_learns_from_rare_successes_or_from_rare_failures(right: int, learns: str) -> None:
    """arXiv 2509.22611, equation 4: the baseline is 0 where the share of right answers is at most 0.6, and 1 above."""
    rewards = [1.0] * right + [0.0] * (10 - right)
    worth = first_tokens(QuantileBaseline(0.4), columns(rewards, [0] * 10))
    if learns == "right":
        assert (worth[:right] > 0).all() and not worth[right:].any()
    else:
        assert not worth[:right].any() and (worth[right:] < 0).all()


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n), st.integers(1, 99))))
def test_the_quantiles_rank_is_right_where_the_product_is_rounded(sizes: tuple[int, int, int]) -> None:
    size, part, percent = sizes
    rewards = list(map(float, range(size)))
    for share in {part / size, percent / 100} - {1.0}:
        worth = QuantileBaseline(share)(columns(rewards, [0] * size))
        rank = next(j for j in range(1, size + 1) if j / size >= share)
        assert [*worth].index(0.0) == rank - 1


def test_pass_at_1_is_the_mean_baseline_and_pass_at_k_rewards_the_rare_success_more() -> None:
    right = [True] + [False] * 7
    rollouts = columns(list(map(float, right)), [0] * 8, right=right)
    deviation = math.sqrt(1 / 8 * 7 / 8) + 1e-6
    np.testing.assert_allclose(first_tokens(PassAtK(1), rollouts), first_tokens(PLAIN, rollouts) / deviation, rtol=1e-6)
    often = columns([1.0] * 7 + [0.0], [0] * 8, right=[True] * 7 + [False])
    # Any two have a right one: nothing is left to learn.
    assert not first_tokens(PassAtK(2), often).any()
    rare = [first_tokens(PassAtK(k), rollouts) for k in (1, 4)]
    assert rare[1][1] > rare[0][1]


def test_pass_at_k_counts_what_is_right_whatever_else_is_rewarded() -> None:
    right = [True, False, False, True]
    one, other = (columns(rewards, [0] * 4, right=right) for rewards in ([1.0, 0, 0, 1], [0.2, 0.9, -3, 0.1]))
    np.testing.assert_array_equal(first_tokens(PassAtK(2), one), first_tokens(PassAtK(2), other))
