"""The loss of TOPR, token by token."""

from dataclasses import dataclass

import torch

from rlctl.grpo.losses.base import PolicyLoss, PolicyTerm, PolicyTokens


@dataclass(frozen=True)
class Topr(PolicyLoss):
    """-w A log pi, with w = 1 for A > 0, and r as a constant, at most `most`, for the others.

    A bad answer that has become unlikely is left alone; a good one is learned at full weight however unlikely it is.
    TOPR, arXiv 2503.14286; the paper has the ratio of whole answers.
    """

    most: float = 1.0

    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        ratio = tokens.ratio.detach()
        weight = torch.where(tokens.advantage > 0, 1.0, ratio.clamp(max=self.most))
        return PolicyTerm(-weight * tokens.advantage * tokens.log_prob)
