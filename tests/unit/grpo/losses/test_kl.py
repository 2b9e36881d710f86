"""The KL term's gradient in expectation, computed exactly as a sum over the whole vocabulary."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.grpo.losses.base import PolicyLoss
from rlctl.grpo.losses.check import one_token, outcome
from rlctl.training.interface import TokenBatch
from tests.unit.grpo.losses.drawn import DEFAULTS, make_distillation


def average_kl_gradient(loss: PolicyLoss, logits: Tensor, mu: Tensor, reference: Tensor) -> Tensor:
    """Return the expected gradient of the KL term by `logits`: the exact mean over tokens sampled from `mu`."""
    policy = logits.log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(len(mu)):
        fields = {
            "advantage": torch.zeros(1),
            "rollout_log_prob": mu[token : token + 1].log(),
            "proximal_log_prob": torch.tensor([-1.0]),
            "reference_log_prob": reference[token : token + 1].log(),
        }
        where = torch.zeros(1, dtype=torch.int64)
        batch = TokenBatch(policy[token : token + 1], torch.zeros(1), torch.tensor([True]), fields, where, 1, where, 1)
        total = total + mu[token] * loss(batch).loss
    return torch.autograd.grad(total, logits)[0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("proximal", ["rollout", "recompute"])
def test_kl_gradient_is_exact_in_expectation_also_off_policy(estimator: Any, proximal: Any) -> None:
    """k1 and k3 have the gradient of KL(pi || ref), k2 that of E_pi[k2], whichever policy sampled the tokens."""
    random = torch.Generator().manual_seed(1)
    logits, mu_logits, reference_logits = torch.randn(3, 5, generator=random, dtype=torch.float64)
    mu = mu_logits.softmax(-1)
    reference = reference_logits.softmax(-1)
    logits.requires_grad_()
    log_ratio = logits.log_softmax(-1) - reference.log()
    value = log_ratio.square() / 2 if estimator == "k2" else log_ratio
    exact = torch.autograd.grad((logits.softmax(-1) * value).sum(), logits)[0]
    changes: dict[str, Any] = {"kl_estimator": estimator, "proximal": proximal, "importance_cap": 1e6}
    loss = replace(DEFAULTS["grpo"], kl_coef=1.0, kl_max=None, **changes)
    torch.testing.assert_close(average_kl_gradient(loss, logits, mu, reference), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_bound_that_binds_leaves_no_gradient_and_never_turns_its_sign(estimator: Any) -> None:
    """With a bound, the gradient of the KL term has the same sign as without, or is 0."""
    for gap in torch.linspace(-16, 16, 65, dtype=torch.float64).tolist():
        row = one_token(-1.0, -1.0, 0.0)
        row.columns["reference_log_prob"] = row.log_probs.detach() + gap
        loss = replace(DEFAULTS["grpo"], kl_coef=1.0, kl_estimator=estimator, kl_max=None)
        free = outcome(loss, [[row]], [row])
        bounded = outcome(replace(loss, kl_max=10.0), [[row]], [row])
        assert abs(bounded.means["loss/kl"]) == pytest.approx(min(abs(free.means["loss/kl"]), 10.0))
        is_within = abs(free.means["loss/kl"]) <= 10
        assert bounded.gradients[0].item() == pytest.approx(free.gradients[0].item() if is_within else 0.0)


@pytest.mark.parametrize("proximal", ["rollout", "recompute", "current"])
@pytest.mark.parametrize("staleness", [0.0, 0.3])
def test_the_teachers_gradient_is_that_of_the_exact_sum_over_a_vocabulary(proximal: Any, staleness: float) -> None:
    """Compare with the gradient of KL(pi || teacher) over 32 tokens, float64, also where the sampler is stale."""
    random = torch.Generator().manual_seed(2)
    logits, change, teacher_logits, proximal_change = torch.randn(4, 32, generator=random, dtype=torch.float64)
    mu = (logits + staleness * change).softmax(-1)
    teacher = teacher_logits.log_softmax(-1)
    old = {"rollout": mu.log(), "recompute": (logits + 0.1 * proximal_change).log_softmax(-1)}
    policy = logits.requires_grad_().log_softmax(-1)
    exact = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)[0]
    loss = replace(
        DEFAULTS["grpo"], proximal=proximal, importance_cap=1e6, distillation=make_distillation(log_ratio_floor=-50.0)
    )
    where = torch.zeros(1, dtype=torch.int64)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(32):
        at = slice(token, token + 1)
        columns = {
            "advantage": torch.zeros(1),
            "rollout_log_prob": mu[at].log(),
            "proximal_log_prob": old.get(proximal, mu.log())[at],
            "teacher_log_prob": teacher[at],
        }
        batch = TokenBatch(policy[at], torch.zeros(1), torch.tensor([True]), columns, where, 1, where, 1)
        total = total + mu[token] * loss(batch).loss
    gradient = torch.autograd.grad(total, logits)[0]
    torch.testing.assert_close(gradient, exact, rtol=1e-9, atol=1e-12)


def test_a_token_that_the_teacher_never_says_keeps_the_sign_of_its_gradient() -> None:
    """The gradient is -x within the floor and -floor beyond it: x = log(teacher / policy)."""
    loss = replace(DEFAULTS["grpo"], distillation=make_distillation(log_ratio_floor=-10.0))
    for gap in torch.linspace(-40, 8, 49, dtype=torch.float64).tolist():
        row = one_token(-1.0, -1.0, 0.0)
        row.columns["teacher_log_prob"] = row.log_probs.detach() + gap
        assert outcome(loss, [[row]], [row]).gradients[0].item() == pytest.approx(-max(gap, -10.0), rel=1e-6)
