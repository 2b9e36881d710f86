"""The SFT loss: negative log-likelihood of the masked tokens."""

from dataclasses import dataclass

import torch

from rlctl.config.role_schema import DistillationSection
from rlctl.sft.metric_rows import NLL
from rlctl.training.interface import LossNeeds, LossOutput, TokenBatch, Totals


@dataclass(frozen=True)
class NllLoss:
    """Mean negative log-likelihood, nats a token: -(sum of log p over masked tokens) / (number of masked tokens).

    This is the maximum-likelihood objective of InstructGPT's first stage (arXiv 2203.02155, section 3.5). Each masked
    token of an update has the same weight, in every sequence, micro-batch and rank. Metric: `NLL`.
    """

    # Term that adds its coefficient times the divergence from a teacher at each masked token; None adds nothing.
    distillation: DistillationSection | None = None

    @property
    def needs(self) -> LossNeeds:
        """Return the need of the term."""
        return LossNeeds(divergence=self.distillation)

    def __call__(self, batch: TokenBatch) -> LossOutput:
        loss = -torch.where(batch.mask, batch.log_probs, 0).sum()
        means = {NLL.name: (loss.detach(), batch.mask.sum())}
        if self.distillation and batch.divergence is not None:
            loss = loss + self.distillation.coef * batch.divergence.sum()
        return LossOutput(loss, means)

    def normalizer(self, totals: Totals) -> float:
        return totals.tokens
