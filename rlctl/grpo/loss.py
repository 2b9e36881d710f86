"""The policy loss of GRPO: clipped surrogate, KL to the reference, entropy bonus.

Keeps the contract of `Loss`: picklable, its value independent of how sequences were packed into micro-batches.
"""

from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from rlctl.config.schema import LossSection
from rlctl.training.interface import LossOutput, TokenBatch, Totals

# exp(20) = 4.9e8: beyond it a ratio is broken anyway, and float32 sums of its square still stay finite.
_MAX_LOG = 20.0


@dataclass(frozen=True)
class GrpoLoss:
    """loss = policy + kl_coef * kl - entropy_coef * entropy, each the mean, under `reduction`, of a token's term.

    Symbols of a token: pi the policy, mu the generator ("behaviour_log_prob"), q the old policy, being mu when
    `proximal` is behaviour and "proximal_log_prob" when recompute, A "advantage", ref "reference_log_prob" (read
    when kl_coef > 0). Ratio r = pi / q. Exponents are held within +-20; a NaN is not hidden.

    - policy: -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347; two bounds: DAPO, arXiv
      2503.14476); with dual_clip c and A < 0 the minimum is at least c A (arXiv 1912.09729).
    - w, a constant: 1 for behaviour; for recompute min(q / mu, importance_cap), or 1 where that is null. The
      decoupled objective (AReaL, arXiv 2505.24298) with truncated importance sampling (TIS: Yao et al. 2025,
      "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").
    - kl: w r k, the estimator k of KL(pi || ref) weighted from mu's tokens to pi's, gradient through r too
      (DeepSeek-V3.2, arXiv 2512.02556). With x = log(ref / pi): k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x
      (Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html; k3 in GRPO: arXiv 2402.03300).
      Gradient, as a factor of w r grad log pi: k1 gives 1 - x and k3 gives -x, both in expectation, as long as
      no w is truncated, exactly grad KL(pi || ref) of a token given those before it, k3 with the smaller
      variance; k2 gives x^2 / 2 - x, the gradient of E_pi[k2], KL's only while pi is near ref. Without the
      weight k1 would have gradient 0 in expectation and k3 that of KL(ref || pi) (arXiv 2506.09477). A token's
      effect on the KL of later ones is left out, as in all of these.
    - entropy: of the policy at that token (arXiv 1602.01783).

    `reduction` token: sum over masked tokens / totals.tokens (DAPO). sequence: each sequence's mean over its
    masked tokens, summed, / totals.sequences (GRPO).
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_coef: float
    kl_estimator: Literal["k1", "k2", "k3"]
    entropy_coef: float
    reduction: Literal["token", "sequence"]
    proximal: Literal["behaviour", "recompute"]
    importance_cap: float | None

    @classmethod
    def from_config(cls, config: LossSection) -> "GrpoLoss":
        """The loss that section `grpo.loss` describes."""
        return cls(**asdict(config))

    def __call__(self, batch: TokenBatch, totals: Totals) -> LossOutput:
        """Loss and metrics of one micro-batch. What stands at unmasked tokens is never read.

        Sums, under `reduction`: loss/policy, loss/kl (when kl_coef > 0), loss/entropy. Sums, means over tokens:
        ratio/mean; ratio/clipped_low and ratio/clipped_high, shares of tokens whose gradient the lower or upper
        bound cuts off (dual_clip is an upper one); for behaviour mismatch/token_mult_prob_error and mismatch/kl, as in
        mismatch.py; for recompute importance/mean, of q / mu before truncation (1
        in expectation), and importance/truncated, the share above the cap. Maxima: ratio/max, 0 without a token.
        KeyError: a field is missing. ValueError: totals that count nothing.
        """
        if totals.tokens < 1 or totals.sequences < 1:
            raise ValueError("no token to train on: the masks of the whole update are empty")
        terms, metrics = self._per_token(batch)
        share = batch.mask.to(batch.log_probs.dtype) / totals.tokens
        means = _sums(terms, share if self.reduction == "token" else _sequence_share(batch, totals))
        loss = means["loss/policy"] - self.entropy_coef * means["loss/entropy"]
        if self.kl_coef:
            loss = loss + self.kl_coef * means["loss/kl"]
        with torch.no_grad():
            sums = {name: mean.detach() for name, mean in means.items()} | _sums(metrics, share)
            return LossOutput(loss, sums, {"ratio/max": metrics["ratio/mean"].where(batch.mask, 0).max()})

    def _per_token(self, batch: TokenBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Terms of the loss, with gradient, and metrics; each [T] and finite at unmasked tokens."""
        log_prob, advantage = batch.log_probs.where(batch.mask, 0), _field(batch, "advantage")
        behaviour = _field(batch, "behaviour_log_prob")
        old = behaviour if self.proximal == "behaviour" else _field(batch, "proximal_log_prob")
        weight, importance = self._importance(old, behaviour)
        ratio = _exp(log_prob - old)
        bounded = self._bounded(ratio, advantage)
        entropy = batch.entropy if self.entropy_coef else batch.entropy.detach()
        terms = {"loss/policy": -(weight * advantage) * bounded, "loss/entropy": entropy.where(batch.mask, 0)}
        if self.kl_coef:
            terms["loss/kl"] = weight * ratio * self._kl(_field(batch, "reference_log_prob") - log_prob)
        with torch.no_grad():
            moves = advantage != 0
            low, high = (ratio < bounded) & moves, (ratio > bounded) & moves
        metrics = {"ratio/mean": ratio.detach(), "ratio/clipped_low": low, "ratio/clipped_high": high}
        if self.proximal == "behaviour":
            metrics |= _mismatch(log_prob.detach() - old, batch.mask)
        return terms, metrics | importance

    def _bounded(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """b with b A = max(min(r A, clip(r) A), c A for A < 0): only the bound against A's pull can bind."""
        rising = ratio.clamp(max=1 + self.clip_high)
        falling = ratio.clamp(1 - self.clip_low, self.dual_clip)
        return torch.where(advantage > 0, rising, falling)

    def _importance(self, old: Tensor, behaviour: Tensor) -> tuple[Tensor | float, dict[str, Tensor]]:
        """The constant w, and its metrics."""
        if self.proximal == "behaviour":
            return 1.0, {}
        weight = _exp(old - behaviour)
        if self.importance_cap is None:
            return 1.0, {"importance/mean": weight}
        metrics = {"importance/mean": weight, "importance/truncated": weight > self.importance_cap}
        return weight.clamp(max=self.importance_cap), metrics

    def _kl(self, log_ratio: Tensor) -> Tensor:
        """The estimator, of x = log(ref / pi)."""
        x = log_ratio.clamp(-_MAX_LOG, _MAX_LOG)
        if self.kl_estimator == "k1":
            return -x
        return x.square() / 2 if self.kl_estimator == "k2" else torch.expm1(x) - x


def _field(batch: TokenBatch, name: str) -> Tensor:
    return batch.fields[name].detach().where(batch.mask, 0)


def _mismatch(gap: Tensor, mask: Tensor) -> dict[str, Tensor]:
    # In the first update of a step the policy is the one that sampled, so the ratio measures the gap between the
    # two engines at no further pass. Names and formulas are those of mismatch.py.
    gap = gap.where(mask, 0)
    return {"mismatch/token_mult_prob_error": gap.abs().exp(), "mismatch/kl": torch.expm1(gap) - gap}


def _exp(x: Tensor) -> Tensor:
    return x.clamp(-_MAX_LOG, _MAX_LOG).exp()


def _sequence_share(batch: TokenBatch, totals: Totals) -> Tensor:
    """[T]: 1 / (masked tokens of the token's sequence x sequences of the update), 0 at unmasked tokens."""
    counted = batch.mask.to(batch.log_probs.dtype)
    lengths = counted.new_zeros(batch.num_sequences).index_add(0, batch.sequence, counted)
    return counted / (lengths.clamp(min=1)[batch.sequence] * totals.sequences)


def _sums(values: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Each value's weighted sum. One product for all; no matmul, which lower-precision settings would round."""
    stacked = torch.stack([value.to(weights.dtype) for value in values.values()])
    return dict(zip(values, (stacked * weights).sum(-1)))
