"""Checks that a loss keeps the contract of `PolicyLoss`, on made-up rollouts in float64.

`rlctl loss check` and rlctl's tests use the checks. Each check returns None, or the problem in one line with numbers
and remedy.
"""

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import chain

import torch
from torch import Tensor

from rlctl.grpo.losses.base import PolicyLoss, PolicyTerm, PolicyTokens
from rlctl.preflight.declared_columns import (
    COLUMNS,
    ROLLOUT_LOG_PROB,
    column_of,
    columns_problem,
    roles_by_column,
)
from rlctl.training.interface import LossOutput, TokenBatch, Totals
from rlctl.training.micro_batching import rollout_index
from rlctl.utils.user_code import defined_at, error_text, raised_at

# Names of all log-prob columns that a sample may have, in the order in which made-up values are drawn.
_LOG_PROBS = [ROLLOUT_LOG_PROB.name]
_LOG_PROBS += [name for name in reversed(roles_by_column(COLUMNS)) if not COLUMNS[name].shape]
_TOLERANCE = 1e-9
# Made-up batches: for each rollout the lengths of its rows. Small batches come first, so that a reported problem is
# small.
_SHAPES = [[[2], [3]], [[3], [3], [2]], [[5], [2], [9], [4]], [[7], [7], [3], [12], [2], [6]]]
_SPLIT_SHAPES = [[[2, 2], [3]], [[3, 2], [4], [2, 6, 3]]]


@dataclass
class MadeUpRow:
    """One made-up row of T tokens. Floats are float64."""

    # [T] each, leaf tensors with gradient. The divergence is of a loss that needs one.
    log_probs: Tensor
    entropy: Tensor
    divergence: Tensor
    # bool [T]: true at the tokens to train on.
    mask: Tensor
    # Name -> [T].
    columns: dict[str, Tensor]
    # Number of the rollout to which the row belongs.
    rollout: int


class MadeUpColumns(dict[str, Tensor]):
    """Columns of a made-up micro-batch. Log-probs of a further role are those of the policy that sampled."""

    def __missing__(self, name: str) -> Tensor:
        if name in COLUMNS or not column_of(name).role:
            raise KeyError(name)
        return self[ROLLOUT_LOG_PROB.name]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check of a loss."""

    # Name of the check, a key of `CHECKS`.
    name: str
    # The problem and its remedy; None if the property holds.
    problem: str | None


@dataclass(frozen=True)
class Outcome:
    """Loss, gradients and metrics of an update over some micro-batches."""

    # Sum of the micro-batches' losses, divided by the normalizer.
    loss: float
    # For each row two tensors [T]: the gradients with respect to its log-probs and to its entropy, divided by the
    # normalizer.
    gradients: list[Tensor]
    # For each row the gradient with respect to its divergence from a teacher, [T], divided by the normalizer.
    divergence_gradients: list[Tensor]
    # Metrics by name: means and maxima over the update.
    means: dict[str, float]
    maxima: dict[str, float]


def made_up_rows(seed: int, lengths: Sequence[Sequence[int]], spread: float = 0.4) -> list[MadeUpRow]:
    """Return random rows of some rollouts. lengths: for each rollout the lengths of its rows.

    The log-probs of policy, generator, old policy and reference differ by about `spread` nats at each token, enough for
    some ratios to be clipped. The mask is true at about 7 of 10 tokens. A fifth of the advantages are 0.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(size: int, scale: float) -> Tensor:
        return scale * torch.randn(size, generator=random, dtype=torch.float64)

    rows = []
    for rollout, sizes in enumerate(lengths):
        advantage = normal(1, 1.0).mul(torch.rand(1, generator=random) < 0.8)
        for size in sizes:
            base = -1.0 + normal(size, 0.3)
            values = {name: base + normal(size, spread) for name in _LOG_PROBS}
            values["age"] = torch.randint(0, 3, (size,), generator=random).double()
            values["advantage"] = advantage.expand(size).clone()
            mask = torch.rand(size, generator=random) < 0.7
            mask[0] = False
            policy = base + normal(size, spread)
            entropy = normal(size, 1.0).abs()
            divergence = (policy - values[ROLLOUT_LOG_PROB.name]).square()
            row = MadeUpRow(
                log_probs=policy.requires_grad_(),
                entropy=entropy.requires_grad_(),
                divergence=divergence.requires_grad_(),
                mask=mask,
                columns=values,
                rollout=rollout,
            )
            rows.append(row)
    return rows


def pack_rows(rows: Sequence[MadeUpRow]) -> TokenBatch:
    """Return the rows as one micro-batch, the input of a loss."""
    lengths = torch.tensor([len(row.mask) for row in rows])
    rollouts = torch.from_numpy(rollout_index([row.rollout for row in rows]))
    sequence = torch.arange(len(rows)).repeat_interleave(lengths)
    return TokenBatch(
        log_probs=torch.cat([row.log_probs for row in rows]),
        entropy=torch.cat([row.entropy for row in rows]),
        mask=torch.cat([row.mask for row in rows]),
        columns=MadeUpColumns({name: torch.cat([row.columns[name] for row in rows]) for name in rows[0].columns}),
        sequence=sequence,
        num_sequences=len(rows),
        rollout=rollouts[sequence],
        num_rollouts=int(rollouts.max()) + 1,
        divergence=torch.cat([row.divergence for row in rows]),
    )


def totals_of(rows: Sequence[MadeUpRow]) -> Totals:
    """Return the numbers of trained tokens, rows and rollouts, from which a loss computes its normalizer."""
    return Totals(sum(int(row.mask.sum()) for row in rows), len(rows), len({row.rollout for row in rows}))


def outcome(loss: PolicyLoss, micro_batches: Sequence[Sequence[MadeUpRow]], rows: Sequence[MadeUpRow]) -> Outcome:
    """Return the outcome of one update over all micro-batches. rows: all their rows, in the order for `gradients`."""
    outputs = [loss(pack_rows(batch)) for batch in micro_batches if batch]
    divisor = loss.normalizer(totals_of(rows)) or 1
    total = torch.stack([output.loss for output in outputs]).sum() / divisor
    leaves = list(chain.from_iterable((row.log_probs, row.entropy) for row in rows))
    num_leaves = len(leaves)
    leaves += [row.divergence for row in rows]
    gradients = list(torch.autograd.grad(total, leaves, materialize_grads=True))
    maxima = {name: max(output.maxima[name].item() for output in outputs) for name in outputs[0].maxima}
    return Outcome(
        loss=total.item(),
        gradients=gradients[:num_leaves],
        divergence_gradients=gradients[num_leaves:],
        means=read_means(outputs),
        maxima=maxima,
    )


def read_means(outputs: Sequence[LossOutput]) -> dict[str, float]:
    """Return the mean metrics over some micro-batches: sum of totals / sum of weights. Omit metrics of weight 0."""
    means = {}
    for name in outputs[0].means:
        total = sum(output.means[name][0].item() for output in outputs)
        weight = sum(output.means[name][1].item() for output in outputs)
        if weight:
            means[name] = total / weight
    return means


def difference(first: Outcome, second: Outcome) -> str | None:
    """Return a text on the first difference between two outcomes, with numbers; None if only rounding differs."""
    if not _is_close(first.loss, second.loss):
        return f"the loss is {first.loss:.6g} and {second.loss:.6g}"
    first_gradients = first.gradients + first.divergence_gradients
    for first_gradient, second_gradient in zip(first_gradients, second.gradients + second.divergence_gradients):
        distance = (first_gradient - second_gradient).abs()
        if not bool((distance <= _TOLERANCE * (1 + first_gradient.abs())).all()):
            worst = int(distance.nan_to_num(math.inf).argmax())
            return f"the gradient of a token is {first_gradient[worst]:.6g} and {second_gradient[worst]:.6g}"
    return _metric_difference(first.means, second.means) or _metric_difference(first.maxima, second.maxima)


def _metric_difference(first: dict[str, float], second: dict[str, float]) -> str | None:
    for name in first.keys() | second.keys():
        first_value = first.get(name, math.nan)
        second_value = second.get(name, math.nan)
        # If one outcome lacks the metric, its value is NaN here, which is close to no number.
        if not _is_close(first_value, second_value):
            return f"the metric {name} is {first_value:.6g} and {second_value:.6g}"
    return None


def check_loss(loss: PolicyLoss) -> list[CheckResult]:
    """Run every check, on the loss itself and on a variant with ages, a KL term and an entropy term.

    If `policy` raises or returns wrong values, the result has this problem alone, because no other check can run.
    """
    if problem := _policy(loss):
        return [CheckResult("policy", problem)]
    return [CheckResult(name, next(_loss_problems(loss, check), None)) for name, check in CHECKS.items()]


def _loss_problems(loss: PolicyLoss, check: Callable[[PolicyLoss], str | None]) -> Iterator[str]:
    harder = replace(loss, max_age=2, age_decay=0.9, kl_coef=loss.kl_coef or 0.1, entropy_coef=0.01)
    for variant, suffix in ((loss, ""), (harder, ", with ages, KL and entropy")):
        try:
            problem = check(variant)
        except Exception as error:
            problem = f"it raises {type(error).__name__}: {error}"
        if problem:
            yield problem + suffix


def _policy(loss: PolicyLoss) -> str | None:
    """Return the problem if `policy` raises, or does not return a number with gradient for each token; else None."""
    batch = pack_rows(made_up_rows(0, _SHAPES[1]))
    try:
        term = loss.policy(PolicyTokens(batch, loss.proximal))
    except Exception as error:
        place = raised_at(error, type(loss).policy, __file__)
        return f"raises {type(error).__name__} at {place}: {error_text(error)}"
    place = defined_at(type(loss).policy)
    if not isinstance(term, PolicyTerm):
        return f"returns a {type(term).__name__} at {place}: return PolicyTerm(...) of the term of each token"
    num_tokens = len(batch.mask)
    for name in ("value", "low", "high", "ratio"):
        tensor = getattr(term, name)
        if tensor is None and name != "value":
            continue
        if not isinstance(tensor, Tensor):
            kind = f"a {type(tensor).__name__}"
        elif tensor.shape != (num_tokens,):
            kind = f"a tensor of shape {tuple(tensor.shape)}"
        else:
            continue
        return f"{name} is {kind} at {place}: give a number for each of the {num_tokens} tokens, no sum and no mean"
    if not term.value.requires_grad:
        return f"value has no gradient at {place}: it must depend on tokens.log_prob or tokens.ratio, not detached"
    return None


def _sign(loss: PolicyLoss) -> str | None:
    """Return the problem if a gradient step lowers the log-prob of a rollout with advantage 1, or raises it for -1.

    The rollouts are on-policy, and the KL, teacher's and entropy terms are off.
    """
    rows = made_up_rows(0, [[6], [6]], spread=0.0)
    for row, advantage in zip(rows, (1.0, -1.0)):
        row.columns |= {"advantage": torch.full_like(row.entropy, advantage).detach(), "age": torch.zeros(6).double()}
    gradients = outcome(replace(loss, kl_coef=0.0, entropy_coef=0.0, distillation=None), [rows], rows).gradients
    # Each row has two gradients, for log-probs and for entropy. Index 0 and 2 are those for log-probs.
    rise_of_good = -gradients[0].sum().item()
    rise_of_bad = -gradients[2].sum().item()
    remedy = "policy is minimised: the usual term is `-tokens.advantage * tokens.ratio`"
    if not rise_of_good > 0:
        return f"a step changes the log-prob of a rollout of advantage 1 by {rise_of_good:.3g} of its length: {remedy}"
    if rise_of_bad > 0:
        return f"a step raises the log-prob of a rollout of advantage -1, by {rise_of_bad:.3g} of its length: {remedy}"
    return None


def _packing(loss: PolicyLoss) -> str | None:
    for seed, shape in enumerate(_SHAPES):
        rows = made_up_rows(seed, shape)
        together = outcome(loss, [rows], rows)
        for size in (1, 2):
            parts = [rows[start : start + size] for start in range(0, len(rows), size)]
            if gap := difference(together, outcome(loss, parts, rows)):
                return (
                    f"{gap}, of {len(rows)} rollouts in one micro-batch and in {len(parts)}: a token's term may "
                    "depend on its own rollout alone; divide by no count, mean or maximum of the micro-batch, and say "
                    "in `mean_over` what the mean is over"
                )
    return None


def _order(loss: PolicyLoss) -> str | None:
    for seed, shape in enumerate(_SHAPES):
        rows = made_up_rows(seed, shape)
        if gap := difference(outcome(loss, [rows], rows), outcome(loss, [rows[::-1]], rows)):
            return f"{gap}, of {len(rows)} rollouts in their order and backwards"
    return None


def _several_rows(loss: PolicyLoss) -> str | None:
    for seed, shape in enumerate(_SPLIT_SHAPES):
        rows = made_up_rows(seed, shape)
        together = outcome(loss, [rows], rows)
        one_each = [[row for row in rows if row.rollout == rollout] for rollout in range(len(shape))]
        if gap := difference(together, outcome(loss, one_each, rows)):
            return f"{gap}, of rollouts of several rows in one micro-batch and in one each: see packing"
        if loss.needs.whole_rollouts:
            continue
        if gap := difference(together, outcome(loss, [[row] for row in rows], rows)):
            return f"{gap}, of rollouts in one micro-batch and with each row in its own: set `whole_rollouts = True`"
    return None


def _unmasked_tokens(loss: PolicyLoss) -> str | None:
    clean = made_up_rows(3, _SHAPES[2])
    dirty = made_up_rows(3, _SHAPES[2])
    for row in dirty:
        for tensor in (row.log_probs, row.entropy):
            tensor.data[~row.mask] = math.nan
        row.columns = {name: values.where(row.mask, math.nan) for name, values in row.columns.items()}
    gap = difference(outcome(loss, [clean], clean), outcome(loss, [dirty], dirty))
    if gap is None:
        return None
    return f"{gap}, without and with NaN at unmasked tokens: read the fields of `PolicyTokens`, not the batch"


def _nothing_masked(loss: PolicyLoss) -> str | None:
    rows = made_up_rows(0, [[4]])
    rows[0].mask[:] = False
    output = loss(pack_rows(rows))
    if output.loss.item() != 0 or not output.loss.requires_grad:
        return f"the loss of a micro-batch without a masked token is {output.loss.item():.6g}, not a 0 with a gradient"
    (gradient,) = torch.autograd.grad(output.loss, [rows[0].log_probs], materialize_grads=True)
    return f"a token that is not masked has gradient {gradient.abs().max():.6g}" if gradient.any() else None


def _outliers(loss: PolicyLoss) -> str | None:
    for policy in (-1e4, -100.0, -15.0, 0.0):
        for sampler in (-1e4, -1.0, 0.0):
            for advantage in (1.0, -1.0):
                rows = [one_token(policy, sampler, advantage)]
                update = outcome(loss, [rows], rows)
                gradient = update.gradients[0]
                if not math.isfinite(update.loss) or not bool(gradient.isfinite().all()):
                    return (
                        f"log-prob {policy:g} against {sampler:g} gives loss {update.loss:g}, gradient "
                        f"{gradient[0]:g}: use `bounded_exp`"
                    )
    return None


def one_token(policy: float, sampler: float, advantage: float) -> MadeUpRow:
    """Return a rollout of one token, at which the mask is true.

    policy: log-prob under the policy. sampler: log-prob under the generator, the old policy and the reference.
    """
    column = torch.full((1,), sampler, dtype=torch.float64)
    values = dict.fromkeys(_LOG_PROBS, column)
    values |= {"advantage": torch.full_like(column, advantage), "age": torch.zeros_like(column)}
    log_prob = torch.full_like(column, policy).requires_grad_()
    return MadeUpRow(
        log_probs=log_prob,
        entropy=torch.ones_like(column).requires_grad_(),
        divergence=torch.ones_like(column).requires_grad_(),
        mask=torch.ones(1, dtype=torch.bool),
        columns=values,
        rollout=0,
    )


def _pickle(loss: PolicyLoss) -> str | None:
    try:
        copy = pickle.loads(pickle.dumps(loss))
    except Exception as error:
        return f"{type(error).__name__}: {error}: it travels to the ranks, so give it fields of plain values alone"
    is_same = all(getattr(copy, field.name) == getattr(loss, field.name) for field in fields(loss))
    return None if is_same else "a field has another value after it"


def _normalizer(loss: PolicyLoss) -> str | None:
    first = Totals(7, 3, 2)
    second = Totals(4, 1, 1)
    of_parts = loss.normalizer(first) + loss.normalizer(second)
    of_update = loss.normalizer(first + second)
    if not _is_close(of_parts, of_update):
        return f"two parts have {of_parts:.6g} together, the update {of_update:.6g}: an update may be trained in parts"
    nothing = loss.normalizer(Totals(0, 3, 2))
    return None if nothing == 0 else f"it is {nothing:.6g} without a token to train on, not 0"


def _needs(loss: PolicyLoss) -> str | None:
    if problem := columns_problem(loss.columns):
        return problem
    rows = made_up_rows(0, _SHAPES[1])
    declared = loss.needs.columns
    for row in rows:
        row.columns = {name: values for name, values in row.columns.items() if name in declared}
    batch = pack_rows(rows)
    read: set[str] = set()

    class Recorded(MadeUpColumns):
        def __getitem__(self, name: str) -> Tensor:
            read.add(name)
            return super().__getitem__(name)

    batch.columns = Recorded(batch.columns)
    with suppress(KeyError):
        loss(batch)
    undeclared = sorted(read - declared)
    if undeclared:
        name = undeclared[0]
        if columns_problem((name,)):
            return f"reads {name}, which no sample has"
        return f"reads {name}, which `columns` does not name: columns = ({name!r},)"
    unread = sorted(roles_by_column(declared).keys() - read)
    return f"names {unread[0]} in `columns`, which costs a pass a step, and never reads it" if unread else None


def _is_close(first: float, second: float) -> bool:
    return abs(first - second) <= _TOLERANCE * (1 + abs(first))


CHECKS: dict[str, Callable[[PolicyLoss], str | None]] = {
    "sign": _sign,
    "packing": _packing,
    "order": _order,
    "several rows a rollout": _several_rows,
    "unmasked tokens": _unmasked_tokens,
    "empty micro-batch": _nothing_masked,
    "outliers": _outliers,
    "normalizer": _normalizer,
    "needs": _needs,
    "pickle": _pickle,
}
