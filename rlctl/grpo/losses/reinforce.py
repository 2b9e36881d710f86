"""The loss of REINFORCE++: the clipped surrogate, with equal weight for all tokens."""

from dataclasses import dataclass

from rlctl.grpo.losses.grpo import ClippedLoss


@dataclass(frozen=True, kw_only=True)
class ReinforceLoss(ClippedLoss):
    """`ClippedLoss` as the mean over the update's tokens, for advantages that are normalised over the batch.

    REINFORCE++, arXiv 2501.03262, is PPO's surrogate without a critic. It changes the advantage (`grpo.advantage:
    batch_normalized`) and the KL term. It adds k2 without a weight, with the gradient log(pi / ref) grad log pi. This
    is the gradient of k3 here, whose weight has a gradient too.
    """
