"""The loss of GSPO: the clipped surrogate of a rollout's whole ratio."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rlctl.grpo.losses.base import Mean, PolicyTerm, PolicyTokens
from rlctl.grpo.losses.grpo import ClippedLoss
from rlctl.grpo.losses.terms import bounded_exp


@dataclass(frozen=True, kw_only=True)
class GspoLoss(ClippedLoss):
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s the geometric mean of a rollout's ratios pi / q.

    GSPO, arXiv 2507.18071, equations 5 to 7; the mean over rollouts. s is far nearer to 1 than a token's ratio, and so
    are its bounds: nearer than an engine's bfloat16 to the trainer. q is the trainer's own unless the config says
    otherwise. The gradient is s times the mean of grad log pi over the rollout's tokens.

    `level` token is GSPO-token (equations 13 and 14): a token's own s_t = sg(s) pi / sg(pi) has the value of s and the
    gradient of the token's log pi. It is the same update unless advantages, weights or ages differ within a rollout.

    The importance weight and the KL term are those of every loss, token by token; so is age_decay, which tightens the
    bounds of a rollout's older tokens. The ratio/* metrics are of s.
    """

    whole_rollouts: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True

    level: Literal["sequence", "token"]

    @property
    def mean_over(self) -> Mean:
        return "rollouts"

    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        ratio = bounded_exp(tokens.rollout_mean(tokens.log_prob - tokens.old_log_prob))
        if self.level == "token":
            ratio = ratio.detach() * (tokens.log_prob - tokens.log_prob.detach()).exp()
        return self.surrogate(tokens, ratio)
