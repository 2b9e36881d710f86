"""The SFT loss: negative log-likelihood of the masked tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlctl.sft.metric_rows import NLL
from rlctl.training.interface import LossNeeds, LossOutput, TokenBatch, Totals


@dataclass(frozen=True)
class NllLoss:
    """Mean negative log-likelihood, nats a token: -(sum of log p over masked tokens) / (number of masked tokens).

    This is the maximum-likelihood objective of InstructGPT's first stage (arXiv 2203.02155, section 3.5). Each masked
    token of an update has the same weight, in every sequence, micro-batch and rank. Metric: `NLL`.
    """

    needs: ClassVar[LossNeeds] = LossNeeds()

    def __call__(self, batch: TokenBatch) -> LossOutput:
        loss = -torch.where(batch.mask, batch.log_probs, 0).sum()
        return LossOutput(loss, {NLL.name: (loss.detach(), batch.mask.sum())})

    def normalizer(self, totals: Totals) -> float:
        return totals.tokens
