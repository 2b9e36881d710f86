"""The SFT loss: negative log-likelihood of the masked tokens."""

from dataclasses import dataclass

import torch

from rlctl.training.interface import LossOutput, TokenBatch, Totals


@dataclass(frozen=True)
class NllLoss:
    """Mean negative log-likelihood in nats a token: -sum over masked tokens of log p / totals.tokens.

    The maximum-likelihood objective of InstructGPT's first stage (arXiv 2203.02155, section 3.5), each token of
    the update weighing the same whatever sequence, micro-batch or rank it is in. Sums: loss/nll.
    """

    def __call__(self, batch: TokenBatch, totals: Totals) -> LossOutput:
        """ValueError: totals that count no token."""
        if totals.tokens < 1:
            raise ValueError("no token to train on: the masks of the whole update are empty")
        loss = -torch.where(batch.mask, batch.log_probs, 0).sum() / totals.tokens
        return LossOutput(loss, {"loss/nll": loss.detach()})
