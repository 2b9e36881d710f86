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

from rlctl.evaluation.statistics import Estimate, estimate, paired, pass_at, t_quantile

SHARE = (0.0, 1.0)


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_that_have_a_right_one(
    answers: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(answers)))
    choices = list(combinations(answers, k))
    assert pass_at(k, len(answers), sum(answers)) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-15)


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
    found = estimate(2.0, [1.0, 3.0])
    assert (found.low, found.high) == (pytest.approx(2 - 12.706205), pytest.approx(2 + 12.706205))


def test_the_interval_of_a_share_is_of_two_tasks_more() -> None:
    # By hand, 8 of 10: 9 of 12 have mean 0.75 and standard error 0.130558; t(9) is 2.262157.
    found = estimate(0.8, [1.0] * 8 + [0.0] * 2, SHARE)
    assert (found.low, found.high) == (pytest.approx(0.454657, abs=1e-5), 1.0)
    assert estimate(1.0, [1.0] * 10, SHARE).low == pytest.approx(11 / 12 - 2.262157 / 12, abs=1e-6)


def test_one_task_has_no_interval_and_says_so() -> None:
    for bounds in (None, SHARE):
        found = estimate(1.0, [1.0], bounds)
        assert (found.low, found.high, found.note) == (None, None, "one task has no interval")
    assert paired([0.0], [1.0], (-1.0, 1.0)).note == "one task has no interval"


def test_equal_rewards_without_bounds_have_no_interval_and_say_so() -> None:
    found = estimate(0.3, [0.3, 0.1 + 0.2, 0.3])
    assert (found.low, found.note) == (None, "all tasks are equal: no interval")
    equal = estimate(0.3, [0.3] * 3, SHARE)
    assert equal.low is not None and equal.high is not None and equal.low < 0.3 < equal.high


DIFFICULTIES: dict[str, tuple[Callable[[np.random.Generator, int], NDArray[np.float64]], float]] = {
    "equal": (lambda draws, n: np.full(n, 0.9), 0.9),
    "rarely right": (lambda draws, n: np.full(n, 0.05), 0.05),
    "varied": (lambda draws, n: draws.beta(2, 2, n), 0.5),
    "easy or hard": (lambda draws, n: draws.beta(0.1, 0.1, n), 0.5),
    "mostly easy": (lambda draws, n: draws.beta(1, 0.1, n), 1 / 1.1),
    "one in twenty fails always": (lambda draws, n: np.where(draws.random(n) < 0.05, 0.0, 0.99), 0.95 * 0.99),
}


@pytest.mark.parametrize("name", DIFFICULTIES)
@pytest.mark.parametrize("tasks", [2, 3, 5, 20])
def test_the_interval_of_a_share_covers_it_in_93_of_100_evaluations_from_2_tasks_on(name: str, tasks: int) -> None:
    difficulty, share = DIFFICULTIES[name]
    for answers in (1, 4, 16):
        draws, covered = np.random.default_rng(answers), 0
        for _ in range(500):
            means = draws.binomial(answers, difficulty(draws, tasks)) / answers
            covered += covers(estimate(float(means.mean()), means.tolist(), SHARE), share)
        assert covered >= 0.93 * 500, (answers, covered)


@pytest.mark.parametrize("tasks", [2, 3, 5, 20])
def test_the_interval_of_a_reward_covers_it_in_93_of_100_evaluations_from_2_tasks_on(tasks: int) -> None:
    draws, covered = np.random.default_rng(1), 0
    for _ in range(1000):
        means = draws.normal(3.0, 2.0, tasks)
        covered += covers(estimate(float(means.mean()), means.tolist()), 3.0)
    assert 930 <= covered <= 970


@pytest.mark.parametrize("tasks", [2, 3, 5, 20])
def test_the_interval_of_a_difference_covers_it_in_93_of_100_comparisons_from_2_tasks_on(tasks: int) -> None:
    for answers, power in ((1, 0.5), (4, 0.5), (4, 1.0), (16, 0.1)):
        draws, covered = np.random.default_rng(answers), 0
        # The mean of p^a of a uniform p is 1 / (a + 1).
        true = 1 / (1 + power) - 1 / 2
        for _ in range(500):
            before = draws.random(tasks)
            first, second = (draws.binomial(answers, each) / answers for each in (before, before**power))
            # As `paired` has it of shares.
            covered += covers(estimate(float((second - first).mean()), (second - first).tolist(), (-1.0, 1.0)), true)
        assert covered >= 0.93 * 500, (answers, covered)


def covers(found: Estimate, value: float) -> bool:
    return found.low is not None and found.high is not None and found.low <= value <= found.high


@pytest.mark.parametrize("tasks", range(2, 12))
def test_tasks_that_are_all_better_are_more_than_chance_where_their_interval_is_above_0(tasks: int) -> None:
    found = paired([Fraction(0)] * tasks, [Fraction(1)] * tasks, (-1.0, 1.0))
    assert found.low is not None and (found.low > 0) == (found.p_value < 0.05)
    assert found.high == found.mean == 1.0


def test_answers_that_repeat_themselves_narrow_no_interval() -> None:
    repeated = estimate(0.5, [0.0, 1.0] * 10, SHARE)
    independent = estimate(0.5, [0.5] * 20, SHARE)
    assert repeated.low is not None and independent.low is not None and independent.low > repeated.low


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9))
def test_the_p_value_is_that_of_a_count_over_all_signs(pairs: list[tuple[int, int]]) -> None:
    differences = [b - a for a, b in pairs]
    found = paired([Fraction(a, 3) for a, _ in pairs], [Fraction(b, 3) for _, b in pairs])
    sums = [abs(sum(s * d for s, d in zip(signs, differences))) for signs in product((-1, 1), repeat=len(pairs))]
    expected = sum(each >= abs(sum(differences)) for each in sums) / len(sums)
    assert found.p_value == pytest.approx(expected, abs=1e-12)
    assert found.better + found.worse + found.equal == len(pairs)


def test_with_one_answer_a_task_it_is_the_sign_test() -> None:
    first = [Fraction(0)] * 12 + [Fraction(1)] * 3 + [Fraction(1)] * 85
    second = [Fraction(1)] * 12 + [Fraction(0)] * 3 + [Fraction(1)] * 85
    tail = sum(comb(15, wins) for wins in range(12, 16)) / 2**15
    found = paired(first, second)
    assert found.p_value == pytest.approx(2 * tail)
    assert (found.mean, found.better, found.worse, found.equal) == (pytest.approx(0.09), 12, 3, 85)


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 0.1 + 0.2])
def test_numbers_that_are_fractions_have_the_same_exact_test(scale: float) -> None:
    shares = paired([Fraction(0)] * 90, [Fraction(1)] * 90)
    rewards = paired([0.0] * 90, [scale] * 90)
    assert (shares.p_value, shares.test) == (pytest.approx(2 / 2**90), "exact")
    assert (rewards.p_value, rewards.test) == (shares.p_value, shares.test)


def test_the_test_of_real_numbers_is_near_the_exact_one_and_the_same_each_time() -> None:
    first = [0.0] * 15
    second = [2**0.5] * 12 + [-(2**0.5)] * 3
    found = paired(first, second)
    assert found.p_value == pytest.approx(2 * sum(comb(15, w) for w in range(12, 16)) / 2**15, abs=0.01)
    assert found.test == "20,000 drawn signs"
    assert paired(first, second) == found


def test_equal_evaluations_differ_by_nothing() -> None:
    same = [Fraction(1, 2), Fraction(0), Fraction(1)]
    found = paired(same, same)
    assert (found.mean, found.p_value, found.note) == (0.0, 1.0, "all tasks are equal: no interval")
    with pytest.raises(ValueError, match="1 and 2 tasks are no pairs"):
        paired([1.0], [1.0, 2.0])
