"""The loss of REINFORCE++: the clipped surrogate, with equal weight for all tokens."""

from dataclasses import dataclass

from rlctl.grpo.losses.grpo import ClippedLoss


@dataclass(frozen=True, kw_only=True)
class ReinforceLoss(ClippedLoss):
    """`ClippedLoss`, averaged over the update's tokens, for advantages that are normalised over the batch.

    REINFORCE++, arXiv 2501.03262, uses PPO's surrogate without a critic. It changes the advantage
    (`grpo.advantage: batch_normalized`) and the KL term. The paper's KL term is k2 without an importance weight, with
    the gradient log(pi / ref) grad log pi. In rlctl k3 has the same gradient, because its importance weight is
    differentiated too.
    """
