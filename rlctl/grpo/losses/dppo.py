"""The loss of DPPO: the policy gradient within a trust region of probabilities, not of ratios."""

from dataclasses import dataclass

from rlctl.grpo.losses.base import PolicyLoss, PolicyTerm, PolicyTokens
from rlctl.grpo.losses.terms import MAX_LOG


@dataclass(frozen=True, kw_only=True)
class DppoLoss(PolicyLoss):
    """-sg(min(r, ratio_cap)) A log pi where |pi - q| is within bounds, plus rollout_kl_coef log(r)^2 everywhere.

    DPPO with the binary total variation: Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv
    2602.04879. The loss is the mean over the update's tokens. The first term is 0 for a token that A would push further
    out of the trust region: A > 0 and pi - q > mask_high, or A < 0 and pi - q < -mask_low. So the ratio of an
    improbable token may become large, while the probability of a probable token may change only a little. The second
    term is prime-rl's kl_tau penalty. It keeps the policy near q, also at tokens whose first term is 0. With
    `proximal: rollout`, its only value, q is mu, as in the paper.
    """

    mask_low: float
    mask_high: float
    ratio_cap: float
    rollout_kl_coef: float

    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        moved = (tokens.log_prob.exp() - tokens.old_log_prob.exp()).detach()
        low = (moved < -self.mask_low * tokens.shrink) & (tokens.advantage < 0)
        high = (moved > self.mask_high * tokens.shrink) & (tokens.advantage > 0)
        weight = tokens.ratio.detach().clamp(max=self.ratio_cap).where(~(low | high), 0)
        gap = (tokens.log_prob - tokens.old_log_prob).clamp(-MAX_LOG, MAX_LOG)
        penalty = self.rollout_kl_coef * gap.square()
        return PolicyTerm(penalty - (weight * tokens.advantage) * tokens.log_prob, low, high)
