"""Log-probs and entropy from hidden states, a chunk of tokens at a time.

Logits are kept for the backward pass where there is room. Its first chunks are the kept ones; other logits are made
again. Softmax is in float32 throughout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlctl.models.layer_kinds import LogitTransform
from rlctl.training.packing import compile_for_packs

_IDENTITY = LogitTransform()


@dataclass(frozen=True)
class Split:
    """This rank's part of a vocabulary shared out over `group`: the rows of the weight from `first` on."""

    group: dist.ProcessGroup
    first: int


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform = _IDENTITY,
    compiled: bool = False,
    split: Split | None = None,
    kept: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target, and entropy, under softmax(t(hidden @ weight.T + bias) / temperature).

    hidden: [N, h]. weight: [vocab, h]. bias: [vocab]. transform: the t above, of positive scale. targets: int64 [N].
    chunk: rows whose logits exist at one time. compiled: torch.compile fuses the work on logits, which are then read
    twice instead of eleven times. split: weight holds a part of the vocabulary. Results are over the whole vocabulary,
    equal on all ranks. The gradient to hidden is this part's alone; the caller sums it over the ranks. kept: rows whose
    logits a backward pass finds again, in whole chunks from the end. Up to `chunk` they cost no memory that it would
    not need anyway.

    Both are float32 [N] with gradient to hidden, weight and bias. With p the tempered softmax and H its entropy,
    d log p[y] / dz = onehot(y) - p and dH / dz = -p (log p + H), each over the temperature and times dt / dz, which is
    the scale, times 1 - (t / c)^2 under a softcap c.
    """
    apply: Any = _ChunkedLogProbs.apply
    how = temperature, transform.scale, transform.softcap
    kept = kept if torch.is_grad_enabled() else 0
    log_probs, entropy = apply(hidden, weight, bias, targets, how, chunk, compiled, split, kept)
    return log_probs, entropy


# Temperature, and the scale and softcap of the logits' transform.
_How = tuple[float, float, float | None]


# Rows of a weight that are converted at a time.
_ROWS = 1 << 13


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return hidden @ weight.T + bias, in float32 where `hidden` alone is: the whole weight need not fit twice."""
    if hidden.dtype == weight.dtype:
        return F.linear(hidden, weight, bias)
    logits = torch.cat([F.linear(hidden, rows.to(hidden.dtype)) for rows in torch.split(weight, _ROWS)], -1)
    return logits if bias is None else logits + bias


def _transformed(logits: Tensor, how: _How) -> Tensor:
    """Return the transform of logits, float32, perhaps in their own memory."""
    _, scale, softcap = how
    logits = logits.float()
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _tempered(logits: Tensor, how: _How) -> Tensor:
    """Return the transform of logits over the temperature: float32, memory of its own."""
    return _transformed(logits, how) / how[0]


def _chunk_forward(logits: Tensor, targets: Tensor, how: _How) -> tuple[Tensor, Tensor, Tensor]:
    """Return a chunk's log-probs and entropy, float32 [rows] each, and its normalizer, float32 [rows, 2].

    The normalizer is the largest logit and the log of the sum that is left: added up they would cost digits where p is
    near 1.
    """
    scaled = _tempered(logits, how)
    peak = scaled.amax(-1)
    below = scaled.sub_(peak[:, None])
    exp = below.exp()
    # Both sums in one pass over the logits: with z = logit - peak, H = log sum exp(z) - sum z exp(z) / sum exp(z).
    total = exp.sum(-1)
    weighted, log_sum = exp.mul_(below).sum(-1), total.log()
    chosen = below.gather(1, targets[:, None])[:, 0] - log_sum
    return chosen, log_sum - weighted / total, torch.stack((peak, log_sum), -1)


def _forward_split(
    logits: Tensor, targets: Tensor, how: _How, group: dist.ProcessGroup, compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`_chunk_forward` where each rank of `group` has some columns of the logits.

    targets: counted from this rank's first column.
    """
    peak = _tempered(logits.amax(-1), how)
    dist.all_reduce(peak, dist.ReduceOp.MAX, group)
    sums = (_for_chunks(_sums) if compiled else _sums)(logits, targets, how, peak)
    dist.all_reduce(sums, group=group)
    total, chosen, weighted = sums
    log_sum = total.log()
    return chosen - log_sum, log_sum - weighted / total, torch.stack((peak, log_sum), -1)


def _sums(logits: Tensor, targets: Tensor, how: _How, peak: Tensor) -> Tensor:
    """Return float32 [3, rows], with z = logit - peak: sums over these columns of exp(z), the target's z, z exp(z)."""
    below = _tempered(logits, how).sub_(peak[:, None])
    chosen = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    exp = below.exp()
    return torch.stack((exp.sum(-1), torch.where(chosen, below, 0.0).sum(-1), (exp * below).sum(-1)))


def _backward(
    logits: Tensor,
    targets: Tensor,
    how: _How,
    normalizer: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient of a chunk's logits: [rows, vocab], the logits' dtype."""
    peak, log_sum = normalizer[:, :1], normalizer[:, 1:]
    temperature, scale, softcap = how
    transformed = _transformed(logits, how)
    log_p = (transformed / temperature).sub_(peak).sub_(log_sum)
    p = log_p.exp()
    grad = torch.zeros((), device=logits.device)
    if grad_entropy is not None:
        grad = (log_p + entropy[:, None]).mul_(p).mul_(-grad_entropy[:, None])
    if grad_log_probs is not None:
        # A comparison, not a scatter: that would keep the passes over the logits from being one.
        chosen = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
        grad = grad + p.neg_().add_(chosen).mul_(grad_log_probs[:, None])
    if softcap is not None:
        grad = grad * (1 - (transformed / softcap).square())
    if scale != 1.0:
        grad = grad * scale
    return grad.div_(temperature).to(logits.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, float32; on a GPU within the product, which then rounds nothing."""
    if total.is_cuda and left.dtype == torch.bfloat16 and _adds_in_product(total.device):
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    else:
        total += left @ right


@cache
def _adds_in_product(device: torch.device) -> bool:
    """Return True if this torch adds a product of bfloat16 to float32 numbers on the device."""
    total, part = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    try:
        torch.ops.aten.addmm.dtype_out(total, part.T, part, torch.float32, out=total)
    except (RuntimeError, AttributeError):
        return False
    return bool((total == 17).all())


@cache
def _for_chunks(function: Callable[..., Any]) -> Callable[..., Any]:
    # The last chunk of every pack has another size.
    fused = compile_for_packs(function)

    def work(logits: Tensor, *rest: Any) -> Any:
        # A size of one is a constant to torch.compile, which would compile for 10 s for a single row; and so it would
        # for the first pack of one chunk, or of more than one: of a part it looks at the size of the whole.
        if len(logits) == 1:
            return function(logits, *rest)
        # A constant, so that no division by an unknown size finds the place of a logit.
        torch._dynamo.mark_static(logits, 1)  # type: ignore[no-untyped-call]
        return fused(logits, *(each.clone() if isinstance(each, Tensor) else each for each in rest))

    return work


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        how: _How,
        chunk: int,
        compiled: bool,
        split: Split | None,
        kept: int,
    ) -> tuple[Tensor, Tensor]:
        work: Callable[..., Any] = _for_chunks(_chunk_forward) if compiled else _chunk_forward
        if split:
            targets = targets - split.first
            work = partial(_forward_split, group=split.group, compiled=compiled)
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, normalizer = torch.empty_like(log_probs), log_probs.new_empty(len(hidden), 2)
        # First row of a chunk -> its logits.
        ctx.kept = {}
        for at in range(0, len(hidden), chunk):
            rows = slice(at, at + chunk)
            logits = _product(hidden[rows], weight, bias)
            log_probs[rows], entropy[rows], normalizer[rows] = work(logits, targets[rows], how)
            if len(hidden) - at <= kept:
                ctx.kept[at] = logits
            # Freed before the next chunk's are made.
            del logits
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, normalizer)
        ctx.how, ctx.chunk, ctx.compiled = how, chunk, compiled
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, targets, entropy, normalizer = ctx.saved_tensors
        work = _for_chunks(_backward) if ctx.compiled else _backward
        grad_hidden = torch.empty_like(hidden)
        # A frozen head has neither: its gradient is a product, and float32 numbers, for nothing.
        _, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if of_bias else None
        for at in reversed(range(0, len(hidden), ctx.chunk)):
            rows = slice(at, at + ctx.chunk)
            logits = ctx.kept.pop(at) if at in ctx.kept else F.linear(hidden[rows], weight, bias)
            gradients = [None if each is None else each[rows] for each in (grad_log_probs, grad_entropy)]
            grad = work(logits, targets[rows], ctx.how, normalizer[rows], entropy[rows], *gradients)
            del logits
            grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, hidden[rows])
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
            del grad
        given = [None if each is None else each.to(weight.dtype) for each in (grad_weight, grad_bias)]
        return grad_hidden, *given, None, None, None, None, None, None
