"""Measures the gap between the log-probs of generator and trainer, for the same tokens under the same weights.

Pure numpy, in float64. A NaN or an infinity in the input gives a NaN or an infinity in the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = Sequence[NDArray[np.float32]]


@dataclass(frozen=True)
class Mismatch:
    """Gap between the log-probs g of the generator and o of the trainer, over some tokens."""

    # Mean of exp|g - o|: 1 if g and o are equal. Above 1.05 something is wrong (name and bound: NeMo-RL).
    token_mult_prob_error: float
    # Estimate of KL(generator || trainer), mean over tokens, in nats.
    kl: float
    # Largest |g - o|.
    max_abs_diff: float
    # Number of tokens compared.
    tokens: int


def mismatch(rollout: Floats, trainer: Floats, mask: Sequence[NDArray[np.bool_]]) -> Mismatch:
    """Compare log-probs g (rollout) and o (trainer) of the tokens at which mask is true.

    All three have an array of [T_i] for each sequence i. The KL is Schulman's k3, the mean of exp(x) - 1 - x with
    x = o - g, which is unbiased for tokens sampled from the generator ("Approximating KL divergence",
    joschu.net/blog/kl-approx.html). Raises ValueError for lengths that differ, and if no mask is true.
    """
    lengths = [[len(sequence) for sequence in sequences] for sequences in (rollout, trainer, mask)]
    if not lengths[0] == lengths[1] == lengths[2]:
        raise ValueError(f"lengths of rollout, trainer and mask differ: {lengths[0]}, {lengths[1]}, {lengths[2]}")
    if not any(sequence_mask.any() for sequence_mask in mask):
        raise ValueError("no token to compare: every mask is empty")
    chosen = np.concatenate(mask)
    x = np.concatenate(trainer)[chosen].astype(np.float64) - np.concatenate(rollout)[chosen]
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.exp(np.abs(x))
        kl = np.expm1(x) - x
    return Mismatch(float(error.mean()), float(kl.mean()), float(np.abs(x).max()), len(x))
