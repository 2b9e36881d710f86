"""pass@k equals a count over all choices; intervals cover; the paired test is exact."""

from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlctl.evaluation.statistics import Estimate, compare_means, estimate, pass_at, t_quantile

SHARE = (0.0, 1.0)


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_that_have_a_right_one(
    answers: list[bool], draws: st.DataObject
) -> None:
    size = draws.draw(st.integers(1, len(answers)))
    choices = list(combinations(answers, size))
    assert pass_at(size, len(answers), sum(answers)) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-15)


def test_pass_at_1_is_the_accuracy_and_pass_at_n_is_any() -> None:
    assert pass_at(1, 8, 3) == 3 / 8
    assert (pass_at(8, 8, 0), pass_at(8, 8, 1)) == (0.0, 1.0)
    with pytest.raises(ValueError, match=r"pass@9 of 8 samples: k must be from 1 to 8"):
        pass_at(9, 8, 1)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    # Fisher and Yates, Statistical Tables, table III. The normal's is 1.959964.
    [(1, 12.706205), (2, 4.302653), (3, 3.182446), (4, 2.776445), (9, 2.262157), (30, 2.042272), (10_000, 1.960201)],
)
def test_quantiles_are_students(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-6)


def test_the_interval_without_bounds_is_students() -> None:
    mean = estimate(2.0, [1.0, 3.0])
    assert (mean.low, mean.high) == (pytest.approx(2 - 12.706205), pytest.approx(2 + 12.706205))


def test_the_interval_of_a_share_is_of_two_tasks_more() -> None:
    # Computed by hand for 8 of 10: 9 of 12 have mean 0.75 and standard error 0.130558; t(9) is 2.262157.
    share = estimate(0.8, [1.0] * 8 + [0.0] * 2, SHARE)
    assert (share.low, share.high) == (pytest.approx(0.454657, abs=1e-5), 1.0)
    assert estimate(1.0, [1.0] * 10, SHARE).low == pytest.approx(11 / 12 - 2.262157 / 12, abs=1e-6)


def test_one_task_has_no_interval_and_says_so() -> None:
    for bounds in (None, SHARE):
        mean = estimate(1.0, [1.0], bounds)
        assert (mean.low, mean.high, mean.note) == (None, None, "one task has no interval")
    assert compare_means([0.0], [1.0], (-1.0, 1.0)).note == "one task has no interval"


def test_equal_rewards_without_bounds_have_no_interval_and_say_so() -> None:
    unbounded = estimate(0.3, [0.3, 0.1 + 0.2, 0.3])
    assert (unbounded.low, unbounded.note) == (None, "all tasks are equal: no interval")
    bounded = estimate(0.3, [0.3] * 3, SHARE)
    assert bounded.low is not None and bounded.high is not None and bounded.low < 0.3 < bounded.high


DIFFICULTIES: dict[str, tuple[Callable[[np.random.Generator, int], NDArray[np.float64]], float]] = {
    "equal": (lambda draws, tasks: np.full(tasks, 0.9), 0.9),
    "rarely right": (lambda draws, tasks: np.full(tasks, 0.05), 0.05),
    "varied": (lambda draws, tasks: draws.beta(2, 2, tasks), 0.5),
    "easy or hard": (lambda draws, tasks: draws.beta(0.1, 0.1, tasks), 0.5),
    "mostly easy": (lambda draws, tasks: draws.beta(1, 0.1, tasks), 1 / 1.1),
    "one in twenty fails always": (lambda draws, tasks: np.where(draws.random(tasks) < 0.05, 0.0, 0.99), 0.95 * 0.99),
}


@pytest.mark.parametrize("name", DIFFICULTIES)
@pytest.mark.parametrize("tasks", [2, 3, 5, 20])
def test_the_interval_of_a_share_covers_it_in_93_of_100_evaluations_from_2_tasks_on(name: str, tasks: int) -> None:
    difficulty, share = DIFFICULTIES[name]
    for answers in (1, 4, 16):
        draws = np.random.default_rng(answers)
        covered = 0
        for _ in range(500):
            means = draws.binomial(answers, difficulty(draws, tasks)) / answers
            covered += covers(estimate(float(means.mean()), means.tolist(), SHARE), share)
        assert covered >= 0.93 * 500, (answers, covered)


@pytest.mark.parametrize("tasks", [2, 3, 5, 20])
def test_the_interval_of_a_reward_covers_it_in_93_of_100_evaluations_from_2_tasks_on(tasks: int) -> None:
    draws = np.random.default_rng(1)
    covered = 0
    for _ in range(1000):
        means = draws.normal(3.0, 2.0, tasks)
        covered += covers(estimate(float(means.mean()), means.tolist()), 3.0)
    assert 930 <= covered <= 970


@pytest.mark.parametrize("tasks", [2, 3, 5, 20])
def test_the_interval_of_a_difference_covers_it_in_93_of_100_comparisons_from_2_tasks_on(tasks: int) -> None:
    for answers, power in ((1, 0.5), (4, 0.5), (4, 1.0), (16, 0.1)):
        draws = np.random.default_rng(answers)
        covered = 0
        # If p is uniform in [0, 1], the mean of p^a is 1 / (a + 1).
        true_difference = 1 / (1 + power) - 1 / 2
        for _ in range(500):
            before = draws.random(tasks)
            first = draws.binomial(answers, before) / answers
            second = draws.binomial(answers, before**power) / answers
            # `compare_means` computes shares in this way.
            differences = second - first
            mean = estimate(float(differences.mean()), differences.tolist(), (-1.0, 1.0))
            covered += covers(mean, true_difference)
        assert covered >= 0.93 * 500, (answers, covered)


def covers(mean: Estimate, true_mean: float) -> bool:
    return mean.low is not None and mean.high is not None and mean.low <= true_mean <= mean.high


@pytest.mark.parametrize("tasks", range(2, 12))
def test_tasks_that_are_all_better_are_more_than_chance_where_their_interval_is_above_0(tasks: int) -> None:
    difference = compare_means([Fraction(0)] * tasks, [Fraction(1)] * tasks, (-1.0, 1.0))
    assert difference.low is not None and (difference.low > 0) == (difference.p_value < 0.05)
    assert difference.high == difference.mean == 1.0


def test_answers_that_repeat_themselves_narrow_no_interval() -> None:
    repeated = estimate(0.5, [0.0, 1.0] * 10, SHARE)
    independent = estimate(0.5, [0.5] * 20, SHARE)
    assert repeated.low is not None and independent.low is not None and independent.low > repeated.low


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9))
def test_the_p_value_is_that_of_a_count_over_all_signs(pairs: list[tuple[int, int]]) -> None:
    differences = np.array([after - before for before, after in pairs])
    difference = compare_means([Fraction(before, 3) for before, _ in pairs], [Fraction(after, 3) for _, after in pairs])
    sums = [abs(differences @ signs) for signs in product((-1, 1), repeat=len(pairs))]
    expected = sum(distance >= abs(differences.sum()) for distance in sums) / len(sums)
    assert difference.p_value == pytest.approx(expected, abs=1e-12)
    assert difference.better + difference.worse + difference.equal == len(pairs)


def test_with_one_answer_a_task_it_is_the_sign_test() -> None:
    first = [Fraction(0)] * 12 + [Fraction(1)] * 3 + [Fraction(1)] * 85
    second = [Fraction(1)] * 12 + [Fraction(0)] * 3 + [Fraction(1)] * 85
    tail = sum(comb(15, wins) for wins in range(12, 16)) / 2**15
    difference = compare_means(first, second)
    assert difference.p_value == pytest.approx(2 * tail)
    assert difference.mean == pytest.approx(0.09)
    assert (difference.better, difference.worse, difference.equal) == (12, 3, 85)


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 0.1 + 0.2])
def test_numbers_that_are_fractions_have_the_same_exact_test(scale: float) -> None:
    shares = compare_means([Fraction(0)] * 90, [Fraction(1)] * 90)
    rewards = compare_means([0.0] * 90, [scale] * 90)
    assert (shares.p_value, shares.test) == (pytest.approx(2 / 2**90), "exact")
    assert (rewards.p_value, rewards.test) == (shares.p_value, shares.test)


def test_the_test_of_real_numbers_is_near_the_exact_one_and_the_same_each_time() -> None:
    first = [0.0] * 15
    second = [2**0.5] * 12 + [-(2**0.5)] * 3
    difference = compare_means(first, second)
    tail = sum(comb(15, wins) for wins in range(12, 16)) / 2**15
    assert difference.p_value == pytest.approx(2 * tail, abs=0.01)
    assert difference.test == "20,000 drawn signs"
    assert compare_means(first, second) == difference


def test_equal_evaluations_differ_by_nothing() -> None:
    same = [Fraction(1, 2), Fraction(0), Fraction(1)]
    difference = compare_means(same, same)
    assert (difference.mean, difference.p_value) == (0.0, 1.0)
    assert difference.note == "all tasks are equal: no interval"
    with pytest.raises(ValueError, match="1 and 2 tasks are no pairs"):
        compare_means([1.0], [1.0, 2.0])
