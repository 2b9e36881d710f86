"""The section of each loss, with the limits of its keys, and the metrics of the losses. No torch: a check reads them.

`configs/loss.yaml` has the defaults.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rlctl.config.fields import spec
from rlctl.config.grpo_schema import LossSection, UserLossSection
from rlctl.telemetry.metrics import (
    IN_ASYNC,
    IN_GRPO,
    LEARNING,
    MISMATCH,
    Metric,
    PanelRow,
    ReportChart,
    ages_of_run,
    grpo_where,
    rows_where,
)


@dataclass
class ClippedLossSection(LossSection):
    """Keys of the losses with a clipped surrogate."""

    clips: ClassVar[bool] = True

    clip_low: float = spec("The ratio is clipped below at 1 - clip_low.", ge=0, lt=1)
    clip_high: float = spec("The ratio is clipped above at 1 + clip_high.", ge=0)
    dual_clip: float | None = spec(
        "Where the advantage A is negative, the loss is at most -A times this value. null turns it off.", gt=1
    )


@dataclass
class GrpoLossSection(ClippedLossSection):
    name: Literal["grpo"] = spec("The clipped surrogate of PPO, token by token.")
    reduction: Literal["token", "sequence"] = spec(
        "The loss is the mean over all tokens of the update, or over its rollouts of each one's mean."
    )

    @property
    def whole_rollouts(self) -> bool:
        return self.reduction == "sequence" or super().whole_rollouts


@dataclass
class DrGrpoLossSection(ClippedLossSection):
    name: Literal["dr_grpo"] = spec("The clipped surrogate, divided by a constant length.")
    max_tokens: int | None = spec("The constant length, in tokens. null is generation.max_new_tokens.", ge=1)


@dataclass
class GspoLossSection(ClippedLossSection):
    # Bounds of 3e-4 and 4e-4 are narrower than the gap between engine and trainer in bfloat16. Against the engine's
    # log-probs they held 37% of the tokens of `gspo-tiny` before the policy had moved.
    recomputes: ClassVar[bool] = True
    name: Literal["gspo"] = spec("The clipped surrogate of a rollout's whole ratio, the mean over rollouts.")
    level: Literal["sequence", "token"] = spec(
        "Clip a rollout as a whole (sequence, GSPO), or give each token its own advantage and gradient (token, "
        "GSPO-token)."
    )

    @property
    def whole_rollouts(self) -> bool:
        return True


@dataclass
class CispoLossSection(LossSection):
    name: Literal["cispo"] = spec(
        "The policy gradient with a clipped importance weight. Its proximal is rollout unless it is set."
    )
    clip_low: float = spec("A token's weight is at least 1 - clip_low. 1 is no bound.", ge=0, le=1)
    clip_high: float = spec("A token's weight is at most 1 + clip_high.", ge=0)


@dataclass
class ReinforceLossSection(ClippedLossSection):
    name: Literal["reinforce"] = spec("REINFORCE++: the clipped surrogate, for advantages normalised over the batch.")


@dataclass
class DppoLossSection(LossSection):
    name: Literal["dppo"] = spec(
        "The policy gradient within a trust region of probabilities around the policy that sampled: its proximal is "
        "rollout."
    )
    proximal: Literal["rollout"] = spec("The trust region is around the policy that sampled.")
    mask_low: float = spec(
        "A token of negative advantage is left out where its probability has fallen by more than this.", ge=0
    )
    mask_high: float = spec(
        "A token of positive advantage is left out where its probability has risen by more than this.", ge=0
    )
    ratio_cap: float = spec("A token's importance weight is at most this.", ge=1)
    rollout_kl_coef: float = spec("The weight of the squared log-ratio to the policy that sampled.", ge=0)


AnyLossSection = (
    GrpoLossSection
    | DrGrpoLossSection
    | GspoLossSection
    | CispoLossSection
    | ReinforceLossSection
    | DppoLossSection
    | UserLossSection
)


def _masks(loss: LossSection) -> list[list[float]]:
    """Return the masks that leave out tokens by their importance weight."""
    return [mask for mask in (loss.importance_mask, loss.sequence_mask) if mask]


_RECOMPUTED = "with grpo.loss.proximal=recompute"
_WITH_KL = grpo_where(lambda settled: settled.config.grpo.loss.kl_coef > 0, "with grpo.loss.kl_coef above 0")
_WITH_WEIGHTS = grpo_where(lambda settled: settled.proximal == "recompute", _RECOMPUTED)
_WITH_CAP = grpo_where(
    lambda settled: settled.proximal == "recompute" and settled.config.grpo.loss.importance_cap is not None,
    f"{_RECOMPUTED} and grpo.loss.importance_cap",
)
_WITH_MASK = grpo_where(
    lambda settled: settled.proximal == "recompute" and bool(_masks(settled.config.grpo.loss)),
    f"{_RECOMPUTED} and grpo.loss.importance_mask or sequence_mask",
)
_CLIPPED = ReportChart(LEARNING, "Clipped tokens", 130)
_RATIO = ReportChart(LEARNING, "Policy ratio", 140)
_WEIGHTS = ReportChart(MISMATCH, "Importance weights", 40)
# A table: each row fills its lines.
# fmt: off
POLICY_LOSS = Metric("loss/policy", "policy loss", chart=ReportChart(LEARNING, "Loss", 50),
    panel=[PanelRow("loss", 70)])
KL_TO_REFERENCE = Metric("loss/kl", "KL to the reference, nats a token",
    chart=ReportChart(LEARNING, "KL to the reference", 60), panel=[PanelRow("KL", 80)], when=_WITH_KL)
STEP_MISMATCH = Metric("mismatch/token_mult_prob_error",
    "mean over tokens of exp|trainer - generator log-prob|; 1 is exact; "
    "under top_p or top_k it holds the probability that they cut", "factor",
    chart=ReportChart(MISMATCH, "Mismatch", 10), panel=[PanelRow("mismatch", 120)], over_updates="first")
MISMATCH_KL = Metric("mismatch/kl", "KL between generator and trainer, nats a token",
    chart=ReportChart(MISMATCH, "KL of generator and trainer", 30), over_updates="first")
IMPORTANCE = Metric("importance/mean", "mean of proximal / rollout before it is cut; its expectation is 1",
    chart=_WEIGHTS, when=_WITH_WEIGHTS)
CLIPPED_LOW = Metric("ratio/clipped_low", "share of tokens clipped below", "share", chart=_CLIPPED,
    panel=[PanelRow("clip low", 200)])
CLIPPED_HIGH = Metric("ratio/clipped_high", "share of tokens clipped above", "share", chart=_CLIPPED.with_place(131),
    panel=[PanelRow("clip high", 210)])
MISMATCH_BY_AGE = Metric("mismatch/age_K", "as mismatch/token_mult_prob_error, over tokens of age K", "factor",
    chart=ReportChart(MISMATCH, "Mismatch by age", 20), parts=ages_of_run)
AGE_SHARE = Metric("age/share_K", "share of the trained tokens that are K steps old", "share", chart=None,
    parts=ages_of_run)
METRICS = rows_where(
    IN_GRPO, POLICY_LOSS, KL_TO_REFERENCE,
    Metric("loss/entropy", "entropy, nats a token", chart=ReportChart(LEARNING, "Entropy", 70),
        panel=[PanelRow("entropy", 190)]),
    Metric("ratio/mean", "mean of policy / old policy", chart=_RATIO),
    Metric("ratio/max", "greatest policy / old policy of a token", chart=_RATIO.with_place(141)),
    CLIPPED_LOW, CLIPPED_HIGH, STEP_MISMATCH, MISMATCH_KL,
    *rows_where(IN_ASYNC, MISMATCH_BY_AGE, AGE_SHARE),
    IMPORTANCE,
    Metric("importance/truncated", "share of tokens with proximal / rollout above the cap", "share", chart=_WEIGHTS,
        when=_WITH_CAP),
    Metric("importance/masked", "share of tokens that a mask leaves out", "share", chart=_WEIGHTS, when=_WITH_MASK),
)
# fmt: on
