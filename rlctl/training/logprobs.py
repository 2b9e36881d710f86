"""Log-probs and entropy from hidden states, a chunk of tokens at a time: logits never exist for more than one chunk.

The backward pass makes each chunk's logits again instead of keeping them. Softmax is in float32 throughout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlctl.training.packing import compile_for_packs


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
    compiled: bool = False,
    split: Split | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target, and entropy, under softmax(hidden @ weight.T / temperature).

    hidden: [N, h]. weight: [vocab, h]. targets: int64 [N]. chunk: rows whose logits exist at one time. compiled:
    torch.compile fuses the work on logits, which are then read twice instead of eleven times. split: weight holds a
    part of the vocabulary. Results are over the whole vocabulary, equal on all ranks. The gradient to hidden is this
    part's alone; the caller sums it over the ranks.

    Both are float32 [N] with gradient to hidden and weight. With p the tempered softmax and H its entropy,
    d log p[y] / dz = onehot(y) - p and dH / dz = -p (log p + H), each over the temperature.
    """
    apply: Any = _ChunkedLogProbs.apply
    log_probs, entropy = apply(hidden, weight, targets, temperature, chunk, compiled, split)
    return log_probs, entropy


def _forward(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a chunk's log-probs and entropy, float32 [rows] each, and its normalizer, float32 [rows, 2].

    The normalizer is the largest logit and the log of the sum that is left: added up they would cost digits where p is
    near 1.
    """
    scaled = logits.float() / temperature
    peak = scaled.amax(-1)
    below = scaled.sub_(peak[:, None])
    log_sum = below.exp().sum(-1).log()
    log_p = below.sub_(log_sum[:, None])
    chosen = log_p.gather(1, targets[:, None])[:, 0]
    return chosen, -(log_p.exp().mul_(log_p)).sum(-1), torch.stack((peak, log_sum), -1)


def _forward_split(
    logits: Tensor, targets: Tensor, temperature: float, group: dist.ProcessGroup, compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`_forward` where each rank of `group` has some columns of the logits; targets count from this rank's first."""
    peak = logits.amax(-1).float() / temperature
    dist.all_reduce(peak, dist.ReduceOp.MAX, group)
    sums = (_for_chunks(_sums) if compiled else _sums)(logits, targets, temperature, peak)
    dist.all_reduce(sums, group=group)
    total, chosen, weighted = sums
    log_sum = total.log()
    return chosen - log_sum, log_sum - weighted / total, torch.stack((peak, log_sum), -1)


def _sums(logits: Tensor, targets: Tensor, temperature: float, peak: Tensor) -> Tensor:
    """Return float32 [3, rows], with z = logit - peak: sums over these columns of exp(z), the target's z, z exp(z)."""
    below = (logits.float() / temperature).sub_(peak[:, None])
    chosen = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    exp = below.exp()
    return torch.stack((exp.sum(-1), torch.where(chosen, below, 0.0).sum(-1), (exp * below).sum(-1)))


def _backward(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    normalizer: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient of a chunk's logits: [rows, vocab], the logits' dtype."""
    peak, log_sum = normalizer[:, :1], normalizer[:, 1:]
    log_p = (logits.float() / temperature).sub_(peak).sub_(log_sum)
    p = log_p.exp()
    grad = torch.zeros((), device=logits.device)
    if grad_entropy is not None:
        grad = (log_p + entropy[:, None]).mul_(p).mul_(-grad_entropy[:, None])
    if grad_log_probs is not None:
        # A comparison, not a scatter: that would keep the passes over the logits from being one.
        chosen = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
        grad = grad + p.neg_().add_(chosen).mul_(grad_log_probs[:, None])
    return grad.div_(temperature).to(logits.dtype)


@cache
def _for_chunks(function: Callable[..., Any]) -> Callable[..., Any]:
    # The last chunk of every pack has another size.
    fused = compile_for_packs(function)

    def work(logits: Tensor, *rest: Any) -> Any:
        # A size of one is a constant to torch.compile, which would compile for 10 s for a single row; and so it would
        # for the first pack of one chunk, or of more than one: of a part it looks at the size of the whole.
        if len(logits) == 1:
            return function(logits, *rest)
        return fused(logits, *(each.clone() if isinstance(each, Tensor) else each for each in rest))

    return work


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        compiled: bool,
        split: Split | None,
    ) -> tuple[Tensor, Tensor]:
        work: Callable[..., Any] = _for_chunks(_forward) if compiled else _forward
        if split:
            targets = targets - split.first
            work = partial(_forward_split, group=split.group, compiled=compiled)
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, normalizer = torch.empty_like(log_probs), log_probs.new_empty(len(hidden), 2)
        for at in range(0, len(hidden), chunk):
            rows = slice(at, at + chunk)
            parts = work(F.linear(hidden[rows], weight), targets[rows], temperature)
            log_probs[rows], entropy[rows], normalizer[rows] = parts
        ctx.save_for_backward(hidden, weight, targets, entropy, normalizer)
        ctx.temperature, ctx.chunk, ctx.compiled = temperature, chunk, compiled
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, entropy, normalizer = ctx.saved_tensors
        work = _for_chunks(_backward) if ctx.compiled else _backward
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for at in range(0, len(hidden), ctx.chunk):
            rows = slice(at, at + ctx.chunk)
            logits = F.linear(hidden[rows], weight)
            gradients = [None if each is None else each[rows] for each in (grad_log_probs, grad_entropy)]
            grad = work(logits, targets[rows], ctx.temperature, normalizer[rows], entropy[rows], *gradients)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None
