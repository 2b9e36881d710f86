"""Base class of every policy loss: its inputs, importance weight, KL and entropy terms, mean and metrics.

A loss is a frozen dataclass that adds one method, `PolicyLoss.policy`, which reads as its paper's formula. It keeps the
contract of `training.interface.Loss`: picklable, and a sum that does not depend on how samples were packed.

Symbols: pi, mu, q and ref are the probabilities of a token, given the tokens before it, under the policy, the
generator, the old policy and the reference. A is the advantage, r = pi / q the ratio, rho = q / mu. Exponents are
clipped to +-20; NaN stays NaN.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from rlctl.config.grpo_schema import UserLossSection
from rlctl.config.plugin_options import checked_options
from rlctl.config.plugins import LOSSES
from rlctl.config.role_schema import DistillationSection
from rlctl.grpo.losses.terms import (
    Bounds,
    Estimator,
    bounded_exp,
    is_within,
    kl_estimate,
    kl_term,
    teacher_kl,
    weighted_sums,
)
from rlctl.preflight.declared_columns import (
    ADVANTAGE,
    AGE,
    PROXIMAL_LOG_PROB,
    REFERENCE_LOG_PROB,
    ROLLOUT_LOG_PROB,
    TEACHER_LOG_PROB,
    TEACHER_TOP,
    gives_top,
)
from rlctl.preflight.settled import SettledGrpo
from rlctl.telemetry.metrics import Metric
from rlctl.training.interface import LossNeeds, LossOutput, TokenBatch, Totals
from rlctl.utils.user_code import load_module, load_object

Proximal = Literal["rollout", "recompute", "current"]
# tokens: mean over the update's tokens. rollouts: mean over rollouts of each rollout's mean over tokens.
# A number L: sum over tokens, divided by L and by the number of rollouts.
Mean = Literal["tokens", "rollouts"] | float


@dataclass
class PolicyTokens:
    """The T tokens of one micro-batch, for a policy loss. Every property is [T], and 0 at unmasked tokens.

    Only `log_prob`, `ratio` and `divergence` have a gradient. Reading a column that the loss does not name raises
    KeyError.
    """

    batch: TokenBatch
    proximal: Proximal
    # [T] or a number: age_decay to the power of the token's age. It scales the distance of each bound from 1.
    shrink: Tensor | float = 1.0

    @property
    def mask(self) -> Tensor:
        """True at the tokens that count."""
        return self.batch.mask

    @cached_property
    def log_prob(self) -> Tensor:
        """log pi, with gradient."""
        return self.batch.log_probs.where(self.mask, 0)

    @cached_property
    def advantage(self) -> Tensor:
        """A."""
        return self.column("advantage")

    @cached_property
    def rollout_log_prob(self) -> Tensor:
        """log mu."""
        return self.column("rollout_log_prob")

    @cached_property
    def old_log_prob(self) -> Tensor:
        """log q. As `proximal` says, q is mu, the policy before the step's first update, or the present policy."""
        if self.proximal == "rollout":
            return self.rollout_log_prob
        return self.log_prob.detach() if self.proximal == "current" else self.column("proximal_log_prob")

    @cached_property
    def reference_log_prob(self) -> Tensor:
        """log ref."""
        return self.column("reference_log_prob")

    @cached_property
    def teacher_log_prob(self) -> Tensor:
        """log of the probability under the teacher."""
        return self.column("teacher_log_prob")

    @cached_property
    def divergence(self) -> Tensor:
        """Divergence from the teacher, with gradient, for a loss that needs it (`LossNeeds.divergence`)."""
        if self.batch.divergence is None:
            raise KeyError("divergence")
        return self.batch.divergence.where(self.mask, 0)

    @cached_property
    def ratio(self) -> Tensor:
        """r = pi / q, with gradient."""
        return bounded_exp(self.log_prob - self.old_log_prob)

    @cached_property
    def rollout_lengths(self) -> Tensor:
        """Number of masked tokens of each rollout, [R], at least 1."""
        counted = self.mask.to(self.batch.log_probs.dtype)
        return counted.new_zeros(self.batch.num_rollouts).index_add(0, self.batch.rollout, counted).clamp(min=1)

    def rollout_mean(self, values: Tensor) -> Tensor:
        """Return at each token the mean of `values` over the masked tokens of its rollout, with their gradient."""
        zero = values.new_zeros(self.batch.num_rollouts)
        sums = zero.index_add(0, self.batch.rollout, values.where(self.mask, 0))
        return (sums / self.rollout_lengths)[self.batch.rollout]

    def column(self, name: str) -> Tensor:
        """Return a column of the samples."""
        return self.batch.columns[name].detach().where(self.mask, 0)


@dataclass(frozen=True)
class PolicyTerm:
    """The policy term of each token, [T], and its metrics."""

    # With gradient: the quantity to minimise, before the importance weight.
    value: Tensor
    # bool [T]: tokens held by a lower bound, and tokens held by an upper bound; None: the loss has no bounds.
    low: Tensor | None = None
    high: Tensor | None = None
    # [T]: the ratio to which the bounds apply; None: pi / q.
    ratio: Tensor | None = None
    # Name -> [T], finite: metrics of the loss's own, means over tokens. `PolicyLoss.metrics` declares them.
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(ABC):
    """loss = policy + kl_coef * kl + distillation.coef * teacher - entropy_coef * entropy, each the mean (`mean_over`)
    of a token's term.

    - policy: w times the term of `policy`. w, a constant: 1 for rollout; else min(rho, importance_cap) (truncated
      importance sampling, TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
      Training"; with a clipped surrogate the decoupled objective, AReaL, arXiv 2505.24298). Tokens with rho outside
      `importance_mask` have w = 0 (IcePop: Ling Team, "Every Step Evolves", arXiv 2510.18855), so have all tokens of a
      rollout whose geometric mean of rho is outside `sequence_mask` (Liu et al. 2025, "When Speed Kills Stability").
      importance_cap null: w is rho where a mask keeps the token, as both have it, and 1 without any mask.
    - kl: w r k, the estimator k of KL(pi || ref) weighted from mu's tokens to pi's, gradient through r too
      (DeepSeek-V3.2, arXiv 2512.02556); w r and w r k are at most `kl_max` (`terms.kl_term`). Gradient, as a factor of
      w r grad log pi, with x = log(ref / pi): k1 gives 1 - x and k3 gives -x, both in expectation, as long as nothing
      is truncated, exactly grad KL(pi || ref) of a token given those before it, k3 with the smaller variance; k2 gives
      x^2 / 2 - x, the gradient of E_pi[k2], KL's only while pi is near ref. Without the weight k1 would have gradient 0
      in expectation and k3 that of KL(ref || pi) (arXiv 2506.09477). A token's effect on the KL of later ones is left
      out, as in each of these papers.
    - teacher: w r k3, as kl with the teacher in place of the reference, and log(teacher / pi) at least
      `distillation.log_ratio_floor` (`terms.teacher_kl`). The gradient is that of KL(pi || teacher) of a token, also
      where mu is stale: on-policy distillation (Agarwal et al. 2024, arXiv 2306.13649). Over the vocabulary or the
      teacher's top k: the divergence itself, which needs no weight, since it sums over what mu could have sampled.
    - entropy: of the policy at that token (A3C, arXiv 1602.01783).
    - a token a steps old is held to bounds that are tighter by age_decay^a: the distance from 1 of the ratio's bounds,
      importance_cap - 1.
    """

    # Names of `preflight.declared_columns.COLUMNS` that `policy` reads at any value of the fields below.
    columns: ClassVar[tuple[str, ...]] = ()
    # True: `policy` reads `rollout_mean` or `rollout_lengths`.
    whole_rollouts: ClassVar[bool] = False
    # True: `proximal` auto means recompute in every run, since the bounds are narrower than the gap between engine and
    # trainer.
    recomputes: ClassVar[bool] = False
    # True: the loss has bounds of the ratio.
    clips: ClassVar[bool] = False

    # Rows of the metrics that `policy` returns.
    metrics: ClassVar[Sequence[Metric]] = ()

    # q: mu for rollout, "proximal_log_prob" for recompute, and pi's own value, a constant, for current, which is the
    # same as recompute where the policy has not been updated since, without a pass to compute it.
    proximal: Proximal
    importance_cap: float | None
    importance_mask: Bounds | None
    sequence_mask: Bounds | None
    age_decay: float
    # Largest age of a token, in steps; 0 where tokens have none.
    max_age: int
    kl_coef: float
    kl_estimator: Estimator
    kl_max: float | None
    entropy_coef: float
    distillation: DistillationSection | None
    # True if engines of the teacher give its likeliest tokens, the column `teacher_top`.
    gives_top: bool = False

    @classmethod
    def from_settled(cls, settled: SettledGrpo, **derived: Any) -> Self:
        """Return the loss of a run: keys of `grpo.loss` by their names. derived: fields that replace such keys."""
        section = settled.config.grpo.loss
        options = {**vars(section), "max_age": settled.config.async_.max_age}
        options["gives_top"] = gives_top(settled.config)
        if isinstance(section, UserLossSection):
            options |= checked_options(cls, PolicyLoss, section.further, "grpo.loss")
        options["proximal"] = "current" if settled.on_policy_ratio else settled.proximal
        for name in ("importance_mask", "sequence_mask"):
            options[name] = tuple(options[name]) if options[name] else None
        options |= derived
        names = {loss_field.name for loss_field in fields(cls)}
        return cls(**{name: option for name, option in options.items() if name in names})

    @property
    def mean_over(self) -> Mean:
        """The kind of mean that is taken over the terms of tokens."""
        return "tokens"

    @property
    def needs(self) -> LossNeeds:
        """Columns and placement that the loop provides."""
        columns = {ADVANTAGE.name, ROLLOUT_LOG_PROB.name, *self.columns}
        if self.max_age > 0:
            columns.add(AGE.name)
        if self.proximal == "recompute":
            columns.add(PROXIMAL_LOG_PROB.name)
        if self.kl_coef > 0:
            columns.add(REFERENCE_LOG_PROB.name)
        divergence = None
        if self.distillation and self.distillation.over == "sampled":
            columns.add(TEACHER_LOG_PROB.name)
        else:
            divergence = self.distillation
        if self.gives_top:
            columns.add(TEACHER_TOP.name)
        whole_rollouts = self.whole_rollouts or self.sequence_mask is not None or self.mean_over == "rollouts"
        return LossNeeds(frozenset(columns), whole_rollouts, divergence)

    @abstractmethod
    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        """Return the policy term of every token. It may depend on the token's rollout, but on no other rollout."""

    def normalizer(self, totals: Totals) -> float:
        if not totals.tokens or self.mean_over == "tokens":
            return totals.tokens
        return totals.rollouts if self.mean_over == "rollouts" else totals.rollouts * self.mean_over

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the class's name and file, and the fields: another process may have to import a user's file."""
        module = sys.modules[type(self).__module__]
        file = getattr(module, "__file__", None)
        values = {loss_field.name: getattr(self, loss_field.name) for loss_field in fields(self)}
        return _rebuild_loss, (module.__name__, file, type(self).__qualname__, values)

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return loss and metrics of one micro-batch. Values at unmasked tokens are never read.

        Means over rollouts for `mean_over` rollouts, else over tokens: loss/policy, loss/kl (when kl_coef > 0),
        loss/teacher (with distillation), loss/entropy. Means over tokens: ratio/mean; for a loss with bounds
        ratio/clipped_low and ratio/clipped_high,
        shares of tokens that they hold; for rollout and current mismatch/token_mult_prob_error and mismatch/kl, as in
        logprob_mismatch.py; for recompute and current importance/mean, of rho (1 in expectation), importance/truncated,
        the share above the cap, importance/masked, the share left out by either mask; with max_age, for every age k,
        age/share_k, its share of the tokens, and mismatch/age_k, the mean of exp|q - mu| over them. Maxima: ratio/max,
        0 without a token. Raises KeyError for a column that is missing.
        """
        counted = batch.mask.to(batch.log_probs.dtype)
        count = counted.sum()
        age = batch.columns["age"].detach().where(batch.mask, 0) if self.max_age else None
        tokens = PolicyTokens(batch, self.proximal, 1.0 if age is None or self.age_decay == 1 else self.age_decay**age)
        terms, metrics = self._terms(tokens)
        share = counted
        weight = count
        if self.mean_over == "rollouts":
            share = counted / tokens.rollout_lengths[batch.rollout]
            weight = count.new_full((), batch.num_rollouts)
        sums = weighted_sums(terms, share)
        loss = sums["loss/policy"] - self.entropy_coef * sums["loss/entropy"]
        if self.kl_coef:
            loss = loss + self.kl_coef * sums["loss/kl"]
        if self.distillation:
            loss = loss + self.distillation.coef * sums["loss/teacher"]
        with torch.no_grad():
            means = {name: (value.detach(), weight) for name, value in sums.items()}
            metrics |= self._policy_gap(tokens)
            ages, errors = self._ages(tokens, age)
            totals = weighted_sums(metrics | ages | errors, counted)
            means |= {name: (totals[name], count) for name in metrics | ages}
            means |= {name: (totals[name], totals[share]) for name, share in zip(errors, ages)}
            return LossOutput(loss, means, {"ratio/max": metrics["ratio/mean"].where(batch.mask, 0).max()})

    def _terms(self, tokens: PolicyTokens) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the terms of the loss, with gradient, and metrics: [T] each, finite at unmasked tokens."""
        weight, metrics = self._importance(tokens)
        policy = self.policy(tokens)
        entropy = tokens.batch.entropy if self.entropy_coef else tokens.batch.entropy.detach()
        terms = {
            "loss/policy": policy.value if weight is None else weight * policy.value,
            "loss/entropy": entropy.where(tokens.mask, 0),
        }
        carried = tokens.ratio if weight is None else weight * tokens.ratio
        if self.distillation and self.distillation.over == "sampled":
            log_ratio = tokens.teacher_log_prob - tokens.log_prob
            terms["loss/teacher"] = carried * teacher_kl(log_ratio, self.distillation.log_ratio_floor)
        elif self.distillation:
            terms["loss/teacher"] = tokens.divergence
        if self.kl_coef:
            estimate = kl_estimate(tokens.reference_log_prob - tokens.log_prob, self.kl_estimator)
            terms["loss/kl"] = kl_term(carried, estimate, self.kl_max)
        metrics |= policy.metrics
        metrics["ratio/mean"] = (tokens.ratio if policy.ratio is None else policy.ratio).detach()
        if policy.low is not None:
            metrics["ratio/clipped_low"] = policy.low
        if policy.high is not None:
            metrics["ratio/clipped_high"] = policy.high
        return terms, metrics

    def _importance(self, tokens: PolicyTokens) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the constant w, None for 1 everywhere, and its metrics."""
        if self.proximal == "rollout":
            return None, {}
        log_rho = (tokens.old_log_prob - tokens.rollout_log_prob).detach()
        rho = bounded_exp(log_rho)
        metrics = {"importance/mean": rho}
        weight = None
        if self.importance_cap is not None:
            cap = 1 + (self.importance_cap - 1) * tokens.shrink
            metrics["importance/truncated"] = rho > cap
            weight = rho.clamp(max=cap)
        if self.importance_mask or self.sequence_mask:
            passes = is_within(rho, self.importance_mask)
            if self.sequence_mask:
                passes = passes & is_within(bounded_exp(tokens.rollout_mean(log_rho)), self.sequence_mask)
            metrics["importance/masked"] = ~passes
            weight = (rho if weight is None else weight) * passes
        return weight, metrics

    def _policy_gap(self, tokens: PolicyTokens) -> dict[str, Tensor]:
        """Return the gap between policy and generator at each token, if no separate pass measures it.

        In the first update of a step the policy has the weights that sampled. So this is the gap between trainer and
        engine, without a further pass. Names and formulas are those of logprob_mismatch.py.
        """
        if self.proximal == "recompute":
            return {}
        gap = (tokens.log_prob - tokens.rollout_log_prob).where(tokens.mask, 0)
        return {"mismatch/token_mult_prob_error": gap.abs().exp(), "mismatch/kl": torch.expm1(gap) - gap}

    def _ages(self, tokens: PolicyTokens, age: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return for every age where the tokens have it, and there exp|q - mu|, 0 at tokens of another age."""
        if age is None:
            return {}, {}
        policy = tokens.log_prob if self.proximal == "rollout" else tokens.old_log_prob
        error = (policy - tokens.rollout_log_prob).where(tokens.mask, 0).abs().exp()
        ages = {f"age/share_{steps}": age == steps for steps in range(self.max_age + 1)}
        return ages, {f"mismatch/age_{steps}": error * ages[f"age/share_{steps}"] for steps in range(self.max_age + 1)}


def _rebuild_loss(module_name: str, file: str | None, class_name: str, values: dict[str, Any]) -> PolicyLoss:
    return _load_loss_class(module_name, file, class_name)(**values)


@cache
def _load_loss_class(module_name: str, file: str | None, class_name: str) -> type[PolicyLoss]:
    module = sys.modules.get(module_name)
    if module is None or getattr(module, "__file__", None) != file:
        module = load_module(file if file and not module_name.startswith("rlctl.") else module_name)
    loss_class: type[PolicyLoss] = attrgetter(class_name)(module)
    return loss_class


def make_loss(settled: SettledGrpo) -> PolicyLoss:
    """Return the loss that `grpo.loss.name` names, rlctl's own or module:Class or file.py:Class."""
    name = settled.config.grpo.loss.name
    loss: type[PolicyLoss] = load_object(LOSSES.get(name, name))
    return loss.from_settled(settled)
