"""Divergences of a student's next-token distribution from a teacher's, with gradients to the student alone.

With p the student's and q the teacher's probabilities of a token's vocabulary, both under one temperature:

- reverse_kl: KL(p || q) = sum p log(p / q).
- forward_kl: KL(q || p) = sum q log(q / p).
- jensen_shannon: beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p (GKD, arXiv 2306.13649).

`chunked_divergence` sums over the whole vocabulary. Logits of both models exist for a chunk of tokens at a time, and
the backward pass makes them again. `top_divergence.py` knows the teacher's likeliest tokens alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rlctl.training.logits import (
    HeadGradients,
    OutputHead,
    Tempering,
    compile_for_chunks,
    multiply_head,
    temper_logits,
    transform_logits,
    untemper_gradient,
    widen,
)

Kind = Literal["reverse_kl", "forward_kl", "jensen_shannon"]


@dataclass(frozen=True)
class Divergence:
    """A divergence between the distributions p of a student and q of a teacher."""

    kind: Kind
    # Weight of the teacher in the mixture m, between 0 and 1. Only jensen_shannon reads it.
    beta: float

    def measure(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return the divergence of each row, nats [N]. log_p, log_q: [N, V], sums of exp 1, finite."""
        if self.kind == "forward_kl":
            return (log_q.exp() * (log_q - log_p)).sum(-1)
        if self.kind == "reverse_kl":
            return (log_p.exp() * (log_p - log_q)).sum(-1)
        to_student = (log_p.exp() * _compare_mixture(log_p, log_q, self.beta)).sum(-1)
        to_teacher = (log_q.exp() * _compare_mixture(log_q, log_p, 1 - self.beta)).sum(-1)
        return (self.beta - 1) * to_student - self.beta * to_teacher

    def differentiate(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return the gradient [N, V] of `measure` with respect to logits whose softmax is p."""
        p = log_p.exp()
        if self.kind == "forward_kl":
            return p - log_q.exp()
        # With D the divergence, dD / dp but for a constant of the row, which the softmax takes out.
        if self.kind == "reverse_kl":
            slope = log_p - log_q
        else:
            slope = _compare_mixture(log_p, log_q, self.beta).mul_(self.beta - 1)
        mean_slope = (p * slope).sum(-1, keepdim=True)
        return slope.sub_(mean_slope).mul_(p)


def _compare_mixture(log_p: Tensor, log_q: Tensor, weight: float) -> Tensor:
    """Return log(m / p) with m = weight q + (1 - weight) p, without a difference of large numbers."""
    odds = math.log(weight / (1 - weight))
    return F.softplus(log_q - log_p + odds) + math.log(1 - weight)


def chunked_divergence(
    hidden: Tensor,
    head: OutputHead,
    teacher_hidden: Tensor,
    teacher_head: OutputHead,
    divergence: Divergence,
    *,
    vocab: int,
    temperature: float,
    chunk: int,
    compiled: bool,
) -> Tensor:
    """Return the divergence of each row, float32 [N], with gradient to the student's hidden, weight and bias.

    hidden: [N, h] of the student; teacher_hidden: [N, h of the teacher], at the same tokens. vocab: number of tokens
    that both distributions are over; further columns of either head are padding. temperature: of both distributions.
    chunk: rows whose logits exist at one time. compiled: torch.compile fuses the work on logits. Raises ValueError for
    a head with fewer columns than `vocab`.
    """
    for owner, rows in (("student", head.weight.shape[0]), ("teacher", teacher_head.weight.shape[0])):
        if rows < vocab:
            raise ValueError(f"the {owner}'s head has {rows} tokens; the vocabulary has {vocab}")
    if len(hidden) != len(teacher_hidden):
        raise ValueError(f"the student has {len(hidden)} rows, the teacher {len(teacher_hidden)}")
    teacher = _Teacher(teacher_hidden.detach(), teacher_head.cut(vocab), teacher_head.tempering(temperature))
    apply: Any = _ChunkedDivergence.apply
    values: Tensor = apply(
        hidden, head.weight, head.bias, teacher, divergence, head.tempering(temperature), chunk, compiled
    )
    return values


@dataclass(frozen=True)
class _Teacher:
    """Frozen side of a divergence."""

    # [N, h of the teacher].
    hidden: Tensor
    # Cut to the vocabulary's columns.
    head: OutputHead
    tempering: Tempering

    def logits(self, rows: slice) -> Tensor:
        """Return the head's product, not yet tempered: [rows, vocab]."""
        bias = None if self.head.bias is None else self.head.bias.detach()
        return multiply_head(self.hidden[rows], self.head.weight.detach(), bias)


def _log_softmax(logits: Tensor, tempering: Tempering) -> Tensor:
    return temper_logits(logits, tempering).log_softmax(-1)


def _measure_chunk(
    logits: Tensor, teacher_logits: Tensor, tempering: Tempering, teacher_tempering: Tempering, divergence: Divergence
) -> Tensor:
    """Return the divergence of each row of a chunk: [rows]."""
    return divergence.measure(_log_softmax(logits, tempering), _log_softmax(teacher_logits, teacher_tempering))


def _differentiate_chunk(
    logits: Tensor,
    teacher_logits: Tensor,
    tempering: Tempering,
    teacher_tempering: Tempering,
    divergence: Divergence,
    grad_rows: Tensor,
) -> Tensor:
    """Return the gradient of the student's head product: [rows, vocab], the logits' dtype."""
    transformed = transform_logits(logits, tempering)
    log_p = (transformed / tempering[0]).log_softmax(-1)
    grad = divergence.differentiate(log_p, _log_softmax(teacher_logits, teacher_tempering))
    return untemper_gradient(grad.mul_(grad_rows[:, None]), transformed, tempering).to(logits.dtype)


class _ChunkedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: _Teacher,
        divergence: Divergence,
        tempering: Tempering,
        chunk: int,
        compiled: bool,
    ) -> Tensor:
        measure: Callable[..., Tensor] = compile_for_chunks(_measure_chunk) if compiled else _measure_chunk
        vocab = len(teacher.head.weight)
        values = torch.empty(len(hidden), dtype=widen(hidden.dtype), device=hidden.device)
        for first_row in range(0, len(hidden), chunk):
            rows = slice(first_row, first_row + chunk)
            logits = multiply_head(hidden[rows], weight[:vocab], None if bias is None else bias[:vocab])
            values[rows] = measure(logits, teacher.logits(rows), tempering, teacher.tempering, divergence)
            # Freed before the next chunk's logits are made.
            del logits
        ctx.save_for_backward(hidden, weight, bias)
        # The teacher's tensors are inputs of no gradient. Nothing changes them before the backward pass.
        ctx.teacher = teacher
        ctx.divergence = divergence
        ctx.tempering = tempering
        ctx.chunk = chunk
        ctx.compiled = compiled
        return values

    @staticmethod
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias = ctx.saved_tensors
        differentiate = compile_for_chunks(_differentiate_chunk) if ctx.compiled else _differentiate_chunk
        teacher: _Teacher = ctx.teacher
        vocab = len(teacher.head.weight)
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[1:3])
        for first_row in range(0, len(hidden), ctx.chunk):
            rows = slice(first_row, first_row + ctx.chunk)
            logits = F.linear(hidden[rows], weight[:vocab], None if bias is None else bias[:vocab])
            grad = differentiate(
                logits, teacher.logits(rows), ctx.tempering, teacher.tempering, ctx.divergence, grad_values[rows]
            )
            del logits
            gradients.add(rows, grad)
            del grad
        # No gradient for the teacher and the settings.
        return *gradients.read(), None, None, None, None, None
