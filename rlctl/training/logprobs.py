"""Log-probs and entropy from hidden states, a chunk of tokens at a time: logits never exist for more than one.

The backward pass makes each chunk's logits again instead of keeping them. Softmax is in float32 throughout.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def chunked_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and entropy, under softmax(hidden @ weight.T / temperature).

    hidden: [N, h]; weight: [vocab, h]; targets: int64 [N]; chunk: rows whose logits exist at one time.
    Returns two float32 [N], both with gradient to hidden and weight. With p the tempered softmax and H its
    entropy: d log p[y] / dz = onehot(y) - p, and dH / dz = -p (log p + H), each over the temperature.
    """
    apply: Any = _ChunkedLogProbs.apply
    log_probs, entropy = apply(hidden, weight, targets, temperature, chunk)
    return log_probs, entropy


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return F.linear(hidden, weight).float().div_(temperature).log_softmax(-1)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_probs)
        for at in range(0, len(hidden), chunk):
            rows = slice(at, at + chunk)
            log_p = _log_softmax(hidden[rows], weight, temperature)
            log_probs[rows] = log_p.gather(1, targets[rows, None])[:, 0]
            entropy[rows] = -(log_p.exp().mul_(log_p)).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for at in range(0, len(hidden), ctx.chunk):
            rows = slice(at, at + ctx.chunk)
            log_p = _log_softmax(hidden[rows], weight, ctx.temperature)
            grad = _grad_logits(log_p, targets[rows], entropy[rows], grad_log_probs, grad_entropy, rows)
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _grad_logits(
    log_p: Tensor,
    targets: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    rows: slice,
) -> Tensor:
    """float32 [rows, vocab]: gradient of the tempered logits."""
    p = log_p.exp()
    grad = torch.zeros_like(p)
    if grad_entropy is not None:
        grad -= (log_p + entropy[:, None]).mul_(p).mul_(grad_entropy[rows, None])
    if grad_log_probs is not None:
        weighted = grad_log_probs[rows, None]
        grad -= p.mul_(weighted)
        grad.scatter_add_(1, targets[:, None], weighted)
    return grad
