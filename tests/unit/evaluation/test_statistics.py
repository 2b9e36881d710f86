"""pass@k is what a count over all choices gives; intervals cover; the paired test is exact."""

from fractions import Fraction
from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.evaluation.statistics import mean, paired, pass_at, share


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


def test_the_interval_of_one_answer_a_task_is_wilsons() -> None:
    # By hand for 8 of 10: centre (0.8 + z^2/20) / (1 + z^2/10), as in Brown et al., table 1's method.
    found = share(0.8, [1.0] * 8 + [0.0] * 2, 10)
    assert (found.low, found.high) == (pytest.approx(0.490162, abs=1e-6), pytest.approx(0.943318, abs=1e-6))
    assert share(1.0, [1.0] * 10, 10).low == pytest.approx(0.722467, abs=1e-6)


def test_the_interval_of_a_share_covers_it_in_about_95_of_100_samples() -> None:
    draws, right = np.random.default_rng(3), 0
    for _ in range(400):
        difficulty = draws.beta(2, 2, 60)
        answers = draws.random((60, 4)) < difficulty[:, None]
        found = share(float(answers.mean()), answers.mean(axis=1).tolist(), answers.size)
        right += found.low <= 0.5 <= found.high
    assert 0.92 <= right / 400 <= 0.98


def test_answers_that_repeat_themselves_narrow_no_interval() -> None:
    once = share(0.5, [0.0, 1.0] * 10, 20)
    repeated = share(0.5, [0.0, 1.0] * 10, 160)
    assert repeated == once
    independent = share(0.5, [0.5] * 20, 160)
    assert independent.high - independent.low < once.high - once.low


def test_the_interval_of_a_mean_is_normal_over_tasks() -> None:
    found = mean(2.0, [1.0, 3.0])
    assert found.high - 2.0 == pytest.approx(1.959964 * 2**0.5 / 2**0.5)
    assert mean(2.0, [2.0]) == mean(2.0, [2.0, 2.0])


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


def test_the_test_of_real_numbers_is_near_the_exact_one_and_the_same_each_time() -> None:
    first, second = [0.0] * 15, [1.0] * 12 + [-1.0] * 3
    found = paired(first, second)
    assert found.p_value == pytest.approx(2 * sum(comb(15, w) for w in range(12, 16)) / 2**15, abs=0.01)
    assert paired(first, second) == found


def test_equal_evaluations_differ_by_nothing() -> None:
    same = [Fraction(1, 2), Fraction(0), Fraction(1)]
    found = paired(same, same)
    assert (found.mean, found.low, found.high, found.p_value) == (0.0, 0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="1 and 2 tasks are no pairs"):
        paired([1.0], [1.0, 2.0])
