"""Mismatch of generator and trainer against a per-token loop, and its refusals."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from rlctl.grpo.logprob_mismatch import mismatch


def arrays(lengths: list[int], seed: int) -> list[NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    return [-random.exponential(1.0, n).astype(np.float32) for n in lengths]


def test_equals_the_definition_token_by_token() -> None:
    rollout, trainer = arrays([5, 1, 8], 0), arrays([5, 1, 8], 1)
    mask = [np.arange(len(one)) % 3 != 0 for one in rollout]
    errors, kls, gaps = [], [], []
    for g_row, o_row, m_row in zip(rollout, trainer, mask):
        for g, o, m in zip(g_row.tolist(), o_row.tolist(), m_row.tolist()):
            if m:
                gaps.append(max(g - o, o - g))
                errors.append(max(math.exp(g) / math.exp(o), math.exp(o) / math.exp(g)))
                kls.append(math.exp(o) / math.exp(g) - 1 - (o - g))
    result = mismatch(rollout, trainer, mask)
    assert result.token_mult_prob_error == pytest.approx(sum(errors) / len(errors), rel=1e-9)
    assert result.kl == pytest.approx(sum(kls) / len(kls), rel=1e-9)
    assert result.max_abs_diff == pytest.approx(max(gaps), rel=1e-9)
    assert result.tokens == len(gaps)


def test_equal_log_probs_have_error_one_and_no_kl() -> None:
    rows = arrays([4, 3], 0)
    result = mismatch(rows, rows, [np.ones(len(row), bool) for row in rows])
    assert (result.token_mult_prob_error, result.kl, result.max_abs_diff) == (1.0, 0.0, 0.0)


def test_kl_is_the_generators_to_the_trainers_in_expectation() -> None:
    """Over every outcome, repeated as often as the generator draws it, k3 sums to the exact divergence."""
    generator, trainer = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    draws = [0, 0, 1, 2]
    exact = float((generator * np.log(generator / trainer)).sum())
    g, o = (np.log(p)[draws].astype(np.float32) for p in (generator, trainer))
    assert mismatch([g], [o], [np.ones(4, bool)]).kl == pytest.approx(exact, rel=1e-6)


def test_unmasked_tokens_are_not_read() -> None:
    nan = np.float32("nan")
    g, o = np.array([nan, -1.0], np.float32), np.array([0.0, -1.0], np.float32)
    assert mismatch([g], [o], [np.array([False, True])]).token_mult_prob_error == 1.0


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_a_broken_log_prob_stays_visible(bad: str) -> None:
    g, o = np.array([-1.0, -float(bad)], np.float32), np.array([-1.0, -1.0], np.float32)
    result = mismatch([g], [o], [np.ones(2, bool)])
    assert not math.isfinite(result.token_mult_prob_error)
    assert not math.isfinite(result.max_abs_diff)


def test_lengths_that_differ_and_empty_masks_are_errors() -> None:
    two, three = arrays([2], 0), arrays([3], 0)
    with pytest.raises(ValueError, match=r"lengths .* \[2\], \[3\], \[2\]"):
        mismatch(two, three, [np.ones(2, bool)])
    with pytest.raises(ValueError, match="no token to compare"):
        mismatch(two, two, [np.zeros(2, bool)])
    with pytest.raises(ValueError, match="no token to compare"):
        mismatch([], [], [])
