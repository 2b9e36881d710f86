"""`check_loss` finds each violation of the contract of `PolicyLoss` by one check, whose text names the remedy."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import pytest

from rlctl.grpo.losses.base import PolicyLoss, PolicyTerm, PolicyTokens
from rlctl.grpo.losses.check import check_loss
from rlctl.training.interface import Totals
from tests.unit.grpo.losses.drawn import DEFAULTS, load_loss


@dataclass(frozen=True)
class Plain(PolicyLoss):
    """-A log pi, a loss that keeps the contract."""

    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        return PolicyTerm(-tokens.advantage * tokens.log_prob)


class DividesByTokens(Plain):
    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        return PolicyTerm(super().policy(tokens).value / tokens.mask.sum().clamp(min=1))


class DependsOnPlace(Plain):
    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        return PolicyTerm(super().policy(tokens).value * (tokens.batch.rollout + 1))


class ReadsRollouts(Plain):
    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        return PolicyTerm(-tokens.advantage * tokens.rollout_mean(tokens.log_prob).exp())


class ReadsTheBatch(Plain):
    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        return PolicyTerm(-tokens.batch.columns["advantage"] * tokens.batch.log_probs)


class Explodes(Plain):
    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        return PolicyTerm(-tokens.advantage * (tokens.log_prob - tokens.rollout_log_prob).exp())


class CountsTheEmpty(Plain):
    def normalizer(self, totals: Totals) -> float:
        return totals.tokens + 1


class Undeclared(Plain):
    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        return PolicyTerm(-tokens.advantage * (tokens.log_prob - tokens.reference_log_prob))


class DeclaresTooMuch(Plain):
    columns: ClassVar[tuple[str, ...]] = ("reference_log_prob",)


class Descends(Plain):
    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        return PolicyTerm(tokens.advantage * tokens.ratio)


class ForgetsTheAdvantage(Plain):
    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        return PolicyTerm(-tokens.ratio)


class HasNoGradient(Plain):
    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        return PolicyTerm(-tokens.advantage)


class ReadsAFurtherModel(Plain):
    columns: ClassVar = ("novice_log_prob",)

    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        gap = (tokens.log_prob.detach() - tokens.column("novice_log_prob")).abs()
        return PolicyTerm(-tokens.advantage * tokens.ratio * (-gap).exp())


class HidesAFurtherModel(ReadsAFurtherModel):
    columns: ClassVar = ()


def make_default(kind: type[PolicyLoss]) -> PolicyLoss:
    """Return a loss of class `kind` with the options of the default GRPO loss."""
    base = DEFAULTS["grpo"]
    return kind(**{option.name: getattr(base, option.name) for option in fields(PolicyLoss)})


def find_problems(loss: PolicyLoss) -> dict[str, str]:
    """Return name of the check -> problem, for each check that fails."""
    return {check.name: check.problem for check in check_loss(loss) if check.problem}


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_loss_of_rlctl_keeps_the_contract(name: str) -> None:
    assert find_problems(load_loss(f"grpo.loss={name}", "async.enabled=true", "grpo.updates_per_step=2")) == {}


@pytest.mark.parametrize(
    ("kind", "check", "message"),
    [
        (DividesByTokens, "packing", "divide by no count, mean or maximum of the micro-batch"),
        (DependsOnPlace, "order", "2 rollouts in their order and backwards"),
        (ReadsRollouts, "several rows a rollout", "set `whole_rollouts = True`"),
        (ReadsTheBatch, "unmasked tokens", "read the fields of `PolicyTokens`, not the batch"),
        (Explodes, "outliers", "use `bounded_exp`"),
        (CountsTheEmpty, "normalizer", "two parts have 13 together, the update 12"),
        (Undeclared, "needs", "reads reference_log_prob, which `columns` does not name: columns = ("),
        (HidesAFurtherModel, "needs", "reads novice_log_prob, which `columns` does not name: columns = ("),
        (DeclaresTooMuch, "needs", "names reference_log_prob in `columns`, which costs a pass a step"),
        (Descends, "sign", "a step changes the log-prob of a rollout of advantage 1 by -"),
        (ForgetsTheAdvantage, "sign", "a step raises the log-prob of a rollout of advantage -1, by "),
        (HasNoGradient, "policy", "value has no gradient at"),
    ],
)
def test_a_broken_loss_is_told_so_in_one_line(kind: type[PolicyLoss], check: str, message: str) -> None:
    problem = find_problems(make_default(kind))[check]
    assert message in problem and "\n" not in problem


def test_a_loss_that_keeps_the_contract_passes_though_it_is_none_of_ours() -> None:
    assert find_problems(make_default(Plain)) == {}
    assert find_problems(make_default(ReadsAFurtherModel)) == {}


def test_a_loss_that_cannot_travel_is_told_so() -> None:
    @dataclass(frozen=True)
    class Local(Plain):
        scale: Callable[[float], float] = lambda x: x

    assert "travels to the ranks" in find_problems(make_default(Local))["pickle"]


class Sums(Plain):
    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        return PolicyTerm(super().policy(tokens).value.sum())


class Bare(Plain):
    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        return super().policy(tokens).value  # type: ignore[return-value]


class Misspells(Plain):
    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        return PolicyTerm(tokens.ration)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Sums, "value is a tensor of shape () at"),
        (Bare, "returns a Tensor at"),
        (Misspells, "raises AttributeError at"),
    ],
)
def test_a_policy_that_gives_no_terms_is_told_once_with_file_and_line(kind: type[PolicyLoss], message: str) -> None:
    (check,) = check_loss(make_default(kind))
    assert check.problem and check.problem.startswith(message) and "test_check.py:" in check.problem
