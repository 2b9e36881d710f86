"""The loss of a critic: the squared distance of its values from the returns, clipped as in PPO."""

from dataclasses import dataclass

import torch

from rlctl.grpo.critic_rows import CLIPPED, LOSS, MEAN_RETURN, MEAN_VALUE
from rlctl.preflight.declared_columns import RETURN, VALUE
from rlctl.training.interface import LossNeeds, LossOutput, TokenBatch, Totals


@dataclass(frozen=True)
class ValueLoss:
    """max((v - R)^2, (clip(v, V - value_clip, V + value_clip) - R)^2) / 2, the mean over tokens.

    v is the critic's value of the tokens before a token, V its value before the step's first update, and R the return
    (PPO as in Engstrom et al. 2020, arXiv 2005.12729, section 3). Without `value_clip` it is (v - R)^2 / 2.
    """

    value_clip: float | None

    @property
    def needs(self) -> LossNeeds:
        """Columns that the loop provides."""
        return LossNeeds(frozenset({VALUE.name, RETURN.name}))

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return loss and metrics of one micro-batch. Raises KeyError for a column that is missing, and ValueError for
        a model without value head.
        """
        if batch.values is None:
            raise ValueError("a model without value head has no values to learn")
        mask = batch.mask
        counted = mask.to(batch.values.dtype)
        count = counted.sum()
        values = batch.values.where(mask, 0)
        returns = batch.columns[RETURN.name].detach().where(mask, 0)
        old_values = batch.columns[VALUE.name].detach()[:, 0].where(mask, 0)
        squares = (values - returns).square()
        clipped = torch.zeros_like(squares)
        if self.value_clip is not None:
            bounded = values.clamp(old_values - self.value_clip, old_values + self.value_clip)
            bounded_squares = (bounded - returns).square()
            clipped = (bounded_squares > squares).to(squares.dtype)
            squares = torch.maximum(squares, bounded_squares)
        loss = 0.5 * (squares * counted).sum()
        with torch.no_grad():
            means = {
                LOSS.name: (loss.detach(), count),
                CLIPPED.name: ((clipped * counted).sum(), count),
                MEAN_VALUE.name: ((values * counted).sum(), count),
                MEAN_RETURN.name: ((returns * counted).sum(), count),
            }
        return LossOutput(loss, means)

    def normalizer(self, totals: Totals) -> float:
        """Return the number of tokens of the update."""
        return totals.tokens
