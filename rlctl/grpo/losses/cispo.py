"""The loss of CISPO: the policy gradient with a clipped importance weight."""

from dataclasses import dataclass

from rlctl.grpo.losses.base import PolicyLoss, PolicyTerm, PolicyTokens


@dataclass(frozen=True, kw_only=True)
class CispoLoss(PolicyLoss):
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi, averaged over the update's tokens; sg: stop gradient.

    CISPO: MiniMax-M1, arXiv 2506.13585, equations 4 and 5. Clipping limits the weight of a token, but the token keeps
    a gradient. So rare tokens still learn, whose gradient a clipped surrogate sets to 0 after the first update. The
    paper has no lower bound (clip_low 1). ScaleRL, arXiv 2510.13786, limits the weight to 5, and finds hardly other
    results with limits from 4 to 8.
    """

    clip_low: float
    clip_high: float

    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        ratio = tokens.ratio.detach()
        low = 1 - self.clip_low * tokens.shrink
        high = 1 + self.clip_high * tokens.shrink
        weight = ratio.clamp(min=low).clamp(max=high)
        return PolicyTerm(-(weight * tokens.advantage) * tokens.log_prob, ratio < weight, ratio > weight)
