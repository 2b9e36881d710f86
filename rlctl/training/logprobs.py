"""Log-probs and entropy from hidden states, computed in chunks of tokens.

Logits of the last chunks, which the backward pass reads first, are kept if there is room. The backward pass computes
all other logits again. Softmax is always in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlctl.models.layer_kinds import LogitTransform
from rlctl.training.logits import (
    HeadGradients,
    Tempering,
    compile_for_chunks,
    multiply_head,
    temper_logits,
    transform_logits,
    untemper_gradient,
)

_IDENTITY = LogitTransform()


@dataclass(frozen=True)
class Split:
    """This rank's part of a vocabulary that the ranks of `group` divide: the rows of the weight from `first` on."""

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
    kept_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target, and entropy, under softmax(t(hidden @ weight.T + bias) / temperature).

    hidden: [N, h]. weight: [vocab, h]. bias: [vocab]. transform: the t above, of positive scale. targets: int64 [N].
    chunk: rows whose logits exist at one time. compiled: torch.compile fuses the work on logits, which are then read
    twice instead of eleven times. split: weight holds a part of the vocabulary. Results are over the whole vocabulary,
    equal on all ranks. The gradient to hidden is this part's alone; the caller sums it over the ranks. kept_rows: rows
    whose logits a backward pass finds again, in whole chunks from the end. Up to `chunk` rows cost no memory that the
    backward pass would not need anyway.

    Both are float32 [N] with gradient to hidden, weight and bias. With p the tempered softmax and H its entropy,
    d log p[y] / dz = onehot(y) - p and dH / dz = -p (log p + H), each over the temperature and times dt / dz, which is
    the scale, times 1 - (t / c)^2 under a softcap c.
    """
    apply: Any = _ChunkedLogProbs.apply
    tempering = temperature, transform.scale, transform.softcap
    if not torch.is_grad_enabled():
        kept_rows = 0
    log_probs, entropy = apply(hidden, weight, bias, targets, tempering, chunk, compiled, split, kept_rows)
    return log_probs, entropy


def _chunk_forward(logits: Tensor, targets: Tensor, tempering: Tempering) -> tuple[Tensor, Tensor, Tensor]:
    """Return a chunk's log-probs and entropy, float32 [rows] each, and its normalizer, float32 [rows, 2].

    The normalizer is the largest logit, and the log of the sum of exp(logit - largest). Added up the two would cost
    digits where p is near 1.
    """
    scaled = temper_logits(logits, tempering)
    peak = scaled.amax(-1)
    # In place: `scaled` is not read again.
    below_peak = scaled.sub_(peak[:, None])
    exp = below_peak.exp()
    # Both sums in one pass over the logits: with z = logit - peak, H = log sum exp(z) - sum z exp(z) / sum exp(z).
    total = exp.sum(-1)
    weighted = exp.mul_(below_peak).sum(-1)
    log_sum = total.log()
    log_probs = below_peak.gather(1, targets[:, None])[:, 0] - log_sum
    return log_probs, log_sum - weighted / total, torch.stack((peak, log_sum), -1)


def _forward_split(
    logits: Tensor, targets: Tensor, tempering: Tempering, group: dist.ProcessGroup, compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `_chunk_forward` where each rank of `group` has some columns of the logits.

    targets: counted from this rank's first column.
    """
    peak = temper_logits(logits.amax(-1), tempering)
    dist.all_reduce(peak, dist.ReduceOp.MAX, group)
    sum_columns = compile_for_chunks(_sum_columns) if compiled else _sum_columns
    sums = sum_columns(logits, targets, tempering, peak)
    dist.all_reduce(sums, group=group)
    total, target_below_peak, weighted = sums
    log_sum = total.log()
    return target_below_peak - log_sum, log_sum - weighted / total, torch.stack((peak, log_sum), -1)


def _sum_columns(logits: Tensor, targets: Tensor, tempering: Tempering, peak: Tensor) -> Tensor:
    """Return float32 [3, rows], with z = logit - peak: sums over these columns of exp(z), the target's z, z exp(z)."""
    below_peak = temper_logits(logits, tempering).sub_(peak[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    exp = below_peak.exp()
    target_below_peak = torch.where(is_target, below_peak, 0.0).sum(-1)
    return torch.stack((exp.sum(-1), target_below_peak, (exp * below_peak).sum(-1)))


def _backward(
    logits: Tensor,
    targets: Tensor,
    tempering: Tempering,
    normalizer: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient of a chunk's logits: [rows, vocab], the logits' dtype."""
    peak = normalizer[:, :1]
    log_sum = normalizer[:, 1:]
    transformed = transform_logits(logits, tempering)
    log_p = (transformed / tempering[0]).sub_(peak).sub_(log_sum)
    p = log_p.exp()
    grad = torch.zeros((), device=logits.device)
    if grad_entropy is not None:
        grad = (log_p + entropy[:, None]).mul_(p).mul_(-grad_entropy[:, None])
    if grad_log_probs is not None:
        # A comparison, because a scatter would prevent the fusion of all passes over the logits into one.
        is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
        grad = grad + p.neg_().add_(is_target).mul_(grad_log_probs[:, None])
    return untemper_gradient(grad, transformed, tempering).to(logits.dtype)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        tempering: Tempering,
        chunk: int,
        compiled: bool,
        split: Split | None,
        kept_rows: int,
    ) -> tuple[Tensor, Tensor]:
        compute: Callable[..., Any] = compile_for_chunks(_chunk_forward) if compiled else _chunk_forward
        if split:
            targets = targets - split.first
            compute = partial(_forward_split, group=split.group, compiled=compiled)
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_probs)
        normalizer = log_probs.new_empty(len(hidden), 2)
        # First row of a chunk -> the chunk's logits.
        ctx.kept_logits = {}
        for first_row in range(0, len(hidden), chunk):
            rows = slice(first_row, first_row + chunk)
            logits = multiply_head(hidden[rows], weight, bias)
            log_probs[rows], entropy[rows], normalizer[rows] = compute(logits, targets[rows], tempering)
            if len(hidden) - first_row <= kept_rows:
                ctx.kept_logits[first_row] = logits
            # Freed before the next chunk's logits are made.
            del logits
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, normalizer)
        ctx.tempering = tempering
        ctx.chunk = chunk
        ctx.compiled = compiled
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, targets, entropy, normalizer = ctx.saved_tensors
        compute = compile_for_chunks(_backward) if ctx.compiled else _backward
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gradients = HeadGradients(hidden, weight, bias, (needs_weight, needs_bias))
        for first_row in reversed(range(0, len(hidden), ctx.chunk)):
            rows = slice(first_row, first_row + ctx.chunk)
            if first_row in ctx.kept_logits:
                logits = ctx.kept_logits.pop(first_row)
            else:
                logits = F.linear(hidden[rows], weight, bias)
            grad = compute(
                logits,
                targets[rows],
                ctx.tempering,
                normalizer[rows],
                entropy[rows],
                None if grad_log_probs is None else grad_log_probs[rows],
                None if grad_entropy is None else grad_entropy[rows],
            )
            del logits
            gradients.add(rows, grad)
            del grad
        # No gradient for targets and the settings.
        return *gradients.read(), None, None, None, None, None, None
