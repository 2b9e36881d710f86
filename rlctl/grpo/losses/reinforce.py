"""The loss of REINFORCE++: the clipped surrogate over all tokens alike."""

from dataclasses import dataclass

from rlctl.grpo.losses.grpo import ClippedLoss


@dataclass(frozen=True, kw_only=True)
class ReinforceLoss(ClippedLoss):
    """`ClippedLoss` as the mean over the update's tokens, for advantages that are normalised over the batch.

    REINFORCE++, arXiv 2501.03262, is PPO's surrogate without a critic: what it changes is the advantage
    (`grpo.advantage: batch_normalized`) and the KL term. It adds k2 without a weight, of which the gradient is
    log(pi / ref) grad log pi; that is the gradient of k3 here, whose weight has a gradient of its own.
    """
