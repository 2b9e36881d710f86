"""The SFT loss: negative log-likelihood of the masked tokens, and their divergence from a teacher."""

from dataclasses import dataclass

import torch

from rlctl.config.role_schema import DistillationSection
from rlctl.config.schema import SftLossSection
from rlctl.sft.metric_rows import NLL
from rlctl.training.interface import LossNeeds, LossOutput, TokenBatch, Totals
from rlctl.training.metric_rows import KL_TO_TEACHER


@dataclass(frozen=True)
class NllLoss:
    """nll_coef * nll + distillation.coef * teacher, each the mean over the masked tokens, in nats a token.

    - nll: -log p of the token. This is the maximum-likelihood objective of InstructGPT's first stage (arXiv 2203.02155,
      section 3.5).
    - teacher: the divergence of the policy's distribution from the teacher's at that token. With the forward KL it is
      the distillation of Hinton et al. (arXiv 1503.02531) on given text, at temperature 1.

    Each masked token of an update has the same weight, in every sequence, micro-batch and rank. Metrics: `NLL`, and
    with a teacher `KL_TO_TEACHER`.
    """

    nll_coef: float = 1.0
    # Term of the teacher; None adds nothing.
    distillation: DistillationSection | None = None

    @property
    def needs(self) -> LossNeeds:
        """Return the need of the term."""
        return LossNeeds(divergence=self.distillation)

    def __call__(self, batch: TokenBatch) -> LossOutput:
        nll = -torch.where(batch.mask, batch.log_probs, 0).sum()
        count = batch.mask.sum()
        means = {NLL.name: (nll.detach(), count)}
        loss = self.nll_coef * nll
        if self.distillation and batch.divergence is not None:
            divergence = batch.divergence.sum()
            loss = loss + self.distillation.coef * divergence
            means[KL_TO_TEACHER.name] = (divergence.detach(), count)
        return LossOutput(loss, means)

    def normalizer(self, totals: Totals) -> float:
        return totals.tokens


def make_loss(section: SftLossSection) -> NllLoss:
    """Return the loss of `sft.loss`."""
    return NllLoss(section.nll_coef, section.distillation)
