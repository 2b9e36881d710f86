"""`mismatch` equals a plain loop over tokens, and refuses invalid input."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from rlctl.grpo.logprob_mismatch import mismatch


def draw_log_probs(lengths: list[int], seed: int) -> list[NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    return [-random.exponential(1.0, length).astype(np.float32) for length in lengths]


def test_equals_the_definition_token_by_token() -> None:
    generator = draw_log_probs([5, 1, 8], 0)
    trainer = draw_log_probs([5, 1, 8], 1)
    masks = [np.arange(len(log_probs)) % 3 != 0 for log_probs in generator]
    errors = []
    kls = []
    gaps = []
    for generator_row, trainer_row, mask in zip(generator, trainer, masks):
        for g, o, is_sampled in zip(generator_row.tolist(), trainer_row.tolist(), mask.tolist()):
            if is_sampled:
                gaps.append(max(g - o, o - g))
                errors.append(max(math.exp(g) / math.exp(o), math.exp(o) / math.exp(g)))
                kls.append(math.exp(o) / math.exp(g) - 1 - (o - g))
    measured = mismatch(generator, trainer, masks)
    assert measured.token_mult_prob_error == pytest.approx(sum(errors) / len(errors), rel=1e-9)
    assert measured.kl == pytest.approx(sum(kls) / len(kls), rel=1e-9)
    assert measured.max_abs_diff == pytest.approx(max(gaps), rel=1e-9)
    assert measured.tokens == len(gaps)


def test_equal_log_probs_have_error_one_and_no_kl() -> None:
    rows = draw_log_probs([4, 3], 0)
    measured = mismatch(rows, rows, [np.ones(len(row), bool) for row in rows])
    assert (measured.token_mult_prob_error, measured.kl, measured.max_abs_diff) == (1.0, 0.0, 0.0)


def test_kl_is_the_generators_to_the_trainers_in_expectation() -> None:
    """If each token occurs as often as the generator samples it, the mean of k3 is the exact KL divergence."""
    generator = np.array([0.5, 0.25, 0.25])
    trainer = np.array([0.25, 0.5, 0.25])
    draws = [0, 0, 1, 2]
    exact = float((generator * np.log(generator / trainer)).sum())
    generator_row = np.log(generator)[draws].astype(np.float32)
    trainer_row = np.log(trainer)[draws].astype(np.float32)
    assert mismatch([generator_row], [trainer_row], [np.ones(4, bool)]).kl == pytest.approx(exact, rel=1e-6)


def test_unmasked_tokens_are_not_read() -> None:
    nan = np.float32("nan")
    generator = np.array([nan, -1.0], np.float32)
    trainer = np.array([0.0, -1.0], np.float32)
    assert mismatch([generator], [trainer], [np.array([False, True])]).token_mult_prob_error == 1.0


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_a_broken_log_prob_stays_visible(bad: str) -> None:
    generator = np.array([-1.0, -float(bad)], np.float32)
    trainer = np.array([-1.0, -1.0], np.float32)
    measured = mismatch([generator], [trainer], [np.ones(2, bool)])
    assert not math.isfinite(measured.token_mult_prob_error)
    assert not math.isfinite(measured.max_abs_diff)


def test_lengths_that_differ_and_empty_masks_are_errors() -> None:
    two_tokens = draw_log_probs([2], 0)
    three_tokens = draw_log_probs([3], 0)
    with pytest.raises(ValueError, match=r"lengths .* \[2\], \[3\], \[2\]"):
        mismatch(two_tokens, three_tokens, [np.ones(2, bool)])
    with pytest.raises(ValueError, match="no token to compare"):
        mismatch(two_tokens, two_tokens, [np.zeros(2, bool)])
    with pytest.raises(ValueError, match="no token to compare"):
        mismatch([], [], [])
