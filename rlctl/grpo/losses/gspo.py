"""The loss of GSPO: the clipped surrogate with one ratio for each rollout."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rlctl.grpo.losses.base import Mean, PolicyTerm, PolicyTokens
from rlctl.grpo.losses.grpo import ClippedLoss
from rlctl.grpo.losses.terms import bounded_exp


@dataclass(frozen=True, kw_only=True)
class GspoLoss(ClippedLoss):
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), with s the geometric mean of pi / q over a rollout's tokens.

    GSPO, arXiv 2507.18071, equations 5 to 7. The loss is the mean over rollouts. s is much nearer to 1 than the ratio
    of a token, so its bounds are narrow. The mismatch between engine and trainer in bfloat16 is larger than the bounds.
    Therefore q comes from the trainer unless the config sets `proximal`. The gradient of s is s times the mean of
    grad log pi over the rollout's tokens.

    With `level: token` the loss is GSPO-token (equations 13 and 14): each token has s_t = sg(s) pi / sg(pi), with the
    value of s and the gradient of the token's log pi. The update is the same unless advantages, weights or ages differ
    within a rollout.

    Importance weight and KL term are computed for each token, as in every loss. age_decay too works on each token: it
    tightens the bounds at older tokens. The ratio/* metrics show s.
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
