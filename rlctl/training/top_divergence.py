"""Divergences from a teacher of which only the likeliest tokens and their log-probs are known.

The rest of the vocabulary is one further outcome (`bin`), or it is left out and both distributions are those of the
known tokens alone (`renormalized`). A bin's divergence is a lower bound of the whole vocabulary's. A renormalized one
does not pull the student's mass towards the known tokens.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rlctl.training.divergence import Divergence
from rlctl.training.logits import (
    HeadGradients,
    OutputHead,
    Tempering,
    multiply_head,
    temper_logits,
    transform_logits,
    untemper_gradient,
    widen,
)

Rest = Literal["bin", "renormalized"]

# Smallest probability of a teacher's rest: the rounding of 1 in float32. Known log-probs say no more about it.
_SMALLEST_REST = 2.0**-24


def chunked_top(
    hidden: Tensor, head: OutputHead, count: int, *, vocab: int, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return the ids, int64 [N, count], of each row's likeliest tokens, and their log-probs, float32, falling.

    vocab: number of tokens of the distribution; further columns of the head are padding. chunk: rows whose logits exist
    at one time. There is no gradient.
    """
    cut_head = head.cut(vocab)
    ids = torch.empty(len(hidden), count, dtype=torch.long, device=hidden.device)
    log_probs = torch.empty(len(hidden), count, dtype=widen(hidden.dtype), device=hidden.device)
    with torch.no_grad():
        for first_row in range(0, len(hidden), chunk):
            rows = slice(first_row, first_row + chunk)
            logits = multiply_head(hidden[rows], cut_head.weight, cut_head.bias)
            tempered = temper_logits(logits, head.tempering(temperature))
            del logits
            top, ids[rows] = tempered.topk(count)
            log_probs[rows] = top - tempered.logsumexp(-1, keepdim=True)
    return ids, log_probs


def top_divergence(
    hidden: Tensor,
    head: OutputHead,
    ids: Tensor,
    teacher_log_probs: Tensor,
    divergence: Divergence,
    rest: Rest,
    *,
    vocab: int,
    temperature: float,
    chunk: int,
) -> Tensor:
    """Return the divergence of each row, float32 [N], with gradient to the student's hidden, weight and bias.

    hidden: [N, h] of the student. ids: int64 [N, k], the teacher's likeliest tokens, each row's all different.
    teacher_log_probs: float32 [N, k], theirs under the teacher at `temperature`. rest: see the module. vocab, chunk: as
    in `chunked_top`. Raises ValueError unless k is below `vocab`, which leaves a rest.
    """
    count = ids.shape[1]
    if count >= vocab:
        raise ValueError(f"the teacher's top {count} of a vocabulary of {vocab} leave no rest")
    apply: Any = _ChunkedTopLogProbs.apply
    log_p: Tensor = apply(hidden, head.weight, head.bias, ids, head.tempering(temperature), vocab, chunk)
    log_q = teacher_log_probs.detach().to(log_p.dtype)
    if rest == "renormalized":
        return divergence.measure(log_p[:, :count].log_softmax(-1), log_q.log_softmax(-1))
    rest_of_teacher = (1 - log_q.double().exp().sum(-1, keepdim=True)).clamp(min=_SMALLEST_REST)
    return divergence.measure(log_p, torch.cat((log_q, rest_of_teacher.log().to(log_q.dtype)), -1))


class _ChunkedTopLogProbs(torch.autograd.Function):
    """Log-probs [N, k + 1] of k tokens of each row, and of all other tokens together."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        tempering: Tempering,
        vocab: int,
        chunk: int,
    ) -> Tensor:
        log_probs = torch.empty(len(hidden), ids.shape[1] + 1, dtype=widen(hidden.dtype), device=hidden.device)
        normalizer = log_probs.new_empty(len(hidden))
        for first_row in range(0, len(hidden), chunk):
            rows = slice(first_row, first_row + chunk)
            logits = multiply_head(hidden[rows], weight[:vocab], None if bias is None else bias[:vocab])
            tempered = temper_logits(logits, tempering)
            # Freed before the next chunk's logits are made.
            del logits
            log_sum = tempered.logsumexp(-1, keepdim=True)
            log_probs[rows, :-1] = tempered.gather(1, ids[rows]) - log_sum
            # Summed without the tokens: a difference of two sums would cost digits where the rest is small.
            tempered.scatter_(1, ids[rows], -torch.inf)
            log_probs[rows, -1:] = tempered.logsumexp(-1, keepdim=True) - log_sum
            normalizer[rows] = log_sum[:, 0]
        ctx.save_for_backward(hidden, weight, bias, ids, log_probs, normalizer)
        ctx.tempering = tempering
        ctx.vocab = vocab
        ctx.chunk = chunk
        return log_probs

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, ids, log_probs, normalizer = ctx.saved_tensors
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[1:3])
        for first_row in range(0, len(hidden), ctx.chunk):
            rows = slice(first_row, first_row + ctx.chunk)
            logits = F.linear(hidden[rows], weight[: ctx.vocab], None if bias is None else bias[: ctx.vocab])
            transformed = transform_logits(logits, ctx.tempering)
            log_p = (transformed / ctx.tempering[0]).sub_(normalizer[rows, None])
            total = grad_log_probs[rows].sum(-1, keepdim=True)
            # d log p[i] / dz = onehot(i) - p. With R the rest's probability, d log R / dz = p / R - p outside the k
            # tokens, and -p at them.
            p = log_p.exp()
            p_in_rest = log_p.sub_(log_probs[rows, -1:]).exp_()
            grad = p_in_rest.mul_(grad_log_probs[rows, -1:]).addcmul_(p, total, value=-1)
            known = log_probs[rows, :-1].exp()
            # This replaces the numbers at the k tokens, where p / R may be infinite.
            grad.scatter_(1, ids[rows], grad_log_probs[rows, :-1] - known * total)
            product_grad = untemper_gradient(grad, transformed, ctx.tempering).to(logits.dtype)
            gradients.add(rows, product_grad)
            del logits, transformed, log_p, p, p_in_rest, grad, product_grad
        # No gradient for the ids and the settings.
        return *gradients.read(), None, None, None, None
