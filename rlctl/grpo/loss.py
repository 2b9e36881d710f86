"""The policy loss of GRPO: clipped surrogate, KL to the reference, entropy bonus.

It keeps the contract of `Loss`: picklable, and a sum that does not depend on how sequences were packed.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlctl.config.algorithm_schema import GrpoLossSection
from rlctl.config.schema import GrpoConfig
from rlctl.preflight.resolved import Resolved
from rlctl.training.interface import LossOutput, TokenBatch, Totals

# exp(20) = 4.9e8: beyond it a ratio is broken anyway, and float32 sums of its square still stay finite.
_MAX_LOG = 20.0


@dataclass(frozen=True)
class GrpoLoss:
    """loss = policy + kl_coef * kl - entropy_coef * entropy, each the mean, under `reduction`, of a token's term.

    Symbols of a token: pi the policy, mu the generator ("rollout_log_prob"), q the old policy, being mu when
    `proximal` is rollout, "proximal_log_prob" when recompute and pi's own value, a constant, when current (the same
    where the policy has not been updated since, without a pass to compute it), A "advantage", ref "reference_log_prob"
    (read when kl_coef > 0). Ratio r = pi / q. Exponents are held within +-20; a NaN is not hidden.

    - policy: -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347; two bounds: DAPO, arXiv
      2503.14476); with dual_clip c and A < 0 the minimum is at least c A (arXiv 1912.09729).
    - w, a constant: 1 for rollout; else, with rho = q / mu, min(rho, importance_cap), or 1 where that is null. The
      decoupled objective (AReaL, arXiv 2505.24298) with truncated importance sampling (TIS: Yao et al. 2025,
      "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). Tokens with rho outside
      `importance_mask` have w = 0 (IcePop: Ling Team, "Every Step Evolves", arXiv 2510.18855), so have all tokens of a
      sequence whose geometric mean of rho is outside `sequence_mask` (Liu et al. 2025, "When Speed Kills Stability").
    - a token a steps old is held to bounds that are tighter by age_decay^a: clip_low, clip_high, importance_cap - 1.
    - kl: w r k, the estimator k of KL(pi || ref) weighted from mu's tokens to pi's, gradient through r too
      (DeepSeek-V3.2, arXiv 2512.02556). With x = log(ref / pi): k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x
      (Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html; k3 in GRPO: arXiv 2402.03300).
      Gradient, as a factor of w r grad log pi: k1 gives 1 - x and k3 gives -x, both in expectation, as long as
      no w is truncated, exactly grad KL(pi || ref) of a token given those before it, k3 with the smaller
      variance; k2 gives x^2 / 2 - x, the gradient of E_pi[k2], KL's only while pi is near ref. Without the
      weight k1 would have gradient 0 in expectation and k3 that of KL(ref || pi) (arXiv 2506.09477). A token's
      effect on the KL of later ones is left out, as in all of these.
    - entropy: of the policy at that token (arXiv 1602.01783).

    `reduction` token: sum over the update's masked tokens, over their number (DAPO). sequence: sum over its sequences
    of each one's mean over its masked tokens, over the number of sequences (GRPO).
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_coef: float
    kl_estimator: Literal["k1", "k2", "k3"]
    entropy_coef: float
    reduction: Literal["token", "sequence"]
    proximal: Literal["rollout", "recompute", "current"]
    importance_cap: float | None
    importance_mask: tuple[float, float] | None
    sequence_mask: tuple[float, float] | None
    age_decay: float
    max_age: int

    @classmethod
    def from_config(cls, config: GrpoConfig) -> "GrpoLoss":
        """The loss of a run."""
        loss, resolved = config.grpo.loss, Resolved(config)
        assert isinstance(loss, GrpoLossSection)
        return cls(
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            dual_clip=loss.dual_clip,
            kl_coef=loss.kl_coef,
            kl_estimator=loss.kl_estimator,
            entropy_coef=loss.entropy_coef,
            reduction=loss.reduction,
            proximal="current" if resolved.on_policy_ratio else resolved.proximal,
            importance_cap=loss.importance_cap,
            importance_mask=_bounds(loss.importance_mask),
            sequence_mask=_bounds(loss.sequence_mask),
            age_decay=loss.age_decay,
            max_age=resolved.max_age,
        )

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return loss and metrics of one micro-batch. Values at unmasked tokens are never read.

        Means, under `reduction`: loss/policy, loss/kl (when kl_coef > 0), loss/entropy. Means over tokens:
        ratio/mean; ratio/clipped_low and ratio/clipped_high, shares of tokens whose gradient the lower or upper
        bound cuts off (dual_clip is an upper one); for rollout and current mismatch/token_mult_prob_error and
        mismatch/kl, as in logprob_mismatch.py; for recompute and current importance/mean, of q / mu before truncation
        (1 in expectation), importance/truncated, the share above the cap, importance/masked, the share left out by
        either mask; with max_age, for every age k, age/share_k, its share of the tokens, and mismatch/age_k, the mean
        of exp|q - mu| over them. Maxima: ratio/max, 0 without a token. Raises KeyError for a field that is missing.
        """
        counted = batch.mask.to(batch.log_probs.dtype)
        tokens = counted.sum()
        share, weight = counted, tokens
        if self.reduction == "sequence":
            lengths = counted.new_zeros(batch.num_sequences).index_add(0, batch.sequence, counted)
            share, weight = counted / lengths.clamp(min=1)[batch.sequence], tokens.new_full((), batch.num_sequences)
        terms, metrics, errors = self._per_token(batch)
        sums = _sums(terms, share)
        loss = sums["loss/policy"] - self.entropy_coef * sums["loss/entropy"]
        if self.kl_coef:
            loss = loss + self.kl_coef * sums["loss/kl"]
        with torch.no_grad():
            means = {name: (value.detach(), weight) for name, value in sums.items()}
            totals = _sums(metrics | errors, counted)
            means |= {name: (totals[name], tokens) for name in metrics}
            means |= {f"mismatch/age_{name}": (totals[name], totals[f"age/share_{name}"]) for name in errors}
            return LossOutput(loss, means, {"ratio/max": metrics["ratio/mean"].where(batch.mask, 0).max()})

    def normalizer(self, totals: Totals) -> float:
        return totals.sequences if self.reduction == "sequence" and totals.tokens else totals.tokens

    def _per_token(self, batch: TokenBatch) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Return terms of the loss, with gradient; metrics; and age -> exp|q - mu|, 0 at tokens of another age.

        Each is [T] and finite at unmasked tokens.
        """
        log_prob, advantage = batch.log_probs.where(batch.mask, 0), _field(batch, "advantage")
        rollout = _field(batch, "rollout_log_prob")
        age = _field(batch, "age") if self.max_age else None
        shrink = 1.0 if age is None or self.age_decay == 1 else self.age_decay**age
        if self.proximal == "rollout":
            old = rollout
        else:
            old = log_prob.detach() if self.proximal == "current" else _field(batch, "proximal_log_prob")
        weight, metrics = self._importance(batch, old - rollout, shrink)
        ratio = _exp(log_prob - old)
        bounded = self._bounded(ratio, advantage, shrink)
        entropy = batch.entropy if self.entropy_coef else batch.entropy.detach()
        terms = {"loss/policy": -(weight * advantage) * bounded, "loss/entropy": entropy.where(batch.mask, 0)}
        if self.kl_coef:
            terms["loss/kl"] = weight * ratio * self._kl(_field(batch, "reference_log_prob") - log_prob)
        errors: dict[str, Tensor] = {}
        with torch.no_grad():
            moves = advantage != 0
            low, high = (ratio < bounded) & moves, (ratio > bounded) & moves
            metrics |= {"ratio/mean": ratio.detach(), "ratio/clipped_low": low, "ratio/clipped_high": high}
            if self.proximal != "recompute":
                # In the first update of a step the policy is the one that sampled, so the ratio measures the gap
                # between the two engines at no further pass. Names and formulas are those of logprob_mismatch.py.
                gap = (log_prob - rollout).where(batch.mask, 0)
                metrics |= {"mismatch/token_mult_prob_error": gap.abs().exp(), "mismatch/kl": torch.expm1(gap) - gap}
            if age is not None:
                gap = ((log_prob if self.proximal == "rollout" else old) - rollout).where(batch.mask, 0)
                for steps in range(self.max_age + 1):
                    metrics[f"age/share_{steps}"] = age == steps
                    errors[str(steps)] = gap.abs().exp() * (age == steps)
        return terms, metrics, errors

    def _bounded(self, ratio: Tensor, advantage: Tensor, shrink: Tensor | float) -> Tensor:
        """Return b with b A = max(min(r A, clip(r) A), c A for A < 0): only the bound against A's pull can bind."""
        rising = ratio.clamp(max=1 + self.clip_high * shrink)
        falling = ratio.clamp(min=1 - self.clip_low * shrink)
        if self.dual_clip is not None:
            falling = falling.clamp(max=self.dual_clip)
        return torch.where(advantage > 0, rising, falling)

    def _importance(
        self, batch: TokenBatch, log_rho: Tensor, shrink: Tensor | float
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        """Return the constant w, and its metrics."""
        if self.proximal == "rollout":
            return 1.0, {}
        rho = _exp(log_rho)
        metrics = {"importance/mean": rho}
        weight = torch.ones_like(rho)
        if self.importance_cap is not None:
            cap = 1 + (self.importance_cap - 1) * shrink
            metrics["importance/truncated"] = rho > cap
            weight = rho.clamp(max=cap)
        if self.importance_mask or self.sequence_mask:
            kept = _within(rho, self.importance_mask) & _within(_geometric(batch, log_rho), self.sequence_mask)
            metrics["importance/masked"] = ~kept
            weight = weight * kept
        return weight, metrics

    def _kl(self, log_ratio: Tensor) -> Tensor:
        """Return the estimator, of x = log(ref / pi)."""
        x = log_ratio.clamp(-_MAX_LOG, _MAX_LOG)
        if self.kl_estimator == "k1":
            return -x
        return x.square() / 2 if self.kl_estimator == "k2" else torch.expm1(x) - x


def _bounds(pair: list[float] | None) -> tuple[float, float] | None:
    return (pair[0], pair[1]) if pair else None


def _within(value: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    if bounds is None:
        return torch.ones_like(value, dtype=torch.bool)
    return (value >= bounds[0]) & (value <= bounds[1])


def _geometric(batch: TokenBatch, log_ratio: Tensor) -> Tensor:
    """Return [T]: the geometric mean of a ratio over the masked tokens of the token's sequence."""
    counted = batch.mask.to(log_ratio.dtype)
    zero = counted.new_zeros(batch.num_sequences)
    sums = zero.index_add(0, batch.sequence, log_ratio.where(batch.mask, 0))
    return _exp(sums / zero.index_add(0, batch.sequence, counted).clamp(min=1))[batch.sequence]


def _field(batch: TokenBatch, name: str) -> Tensor:
    return batch.fields[name].detach().where(batch.mask, 0)


def _exp(x: Tensor) -> Tensor:
    return x.clamp(-_MAX_LOG, _MAX_LOG).exp()


def _sums(values: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Return each value's weighted sum. One product for all; no matmul, which lower-precision settings would round."""
    stacked = torch.stack([value.to(weights.dtype) for value in values.values()])
    return dict(zip(values, (stacked * weights).sum(-1)))
