"""A student and a teacher made up of hidden states and heads, and their dense divergences in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlctl.models.layer_kinds import LogitTransform
from rlctl.training.divergence import Divergence
from rlctl.training.logits import OutputHead

VOCAB = 32
DIVERGENCES = [
    Divergence("reverse_kl", 0.5),
    Divergence("forward_kl", 0.5),
    Divergence("jensen_shannon", 0.5),
    Divergence("jensen_shannon", 0.1),
]
_IDENTITY = LogitTransform()

NAMES = ["reverse", "forward", "js", "js0.1"]


@dataclass(frozen=True)
class Model:
    """Hidden states at N tokens, and the head."""

    hidden: Tensor
    head: OutputHead

    def to(self, dtype: torch.dtype) -> "Model":
        """Return detached copies of `dtype` that take gradients."""
        bias = self.head.bias
        leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in (self.hidden, self.head.weight)]
        if bias is not None:
            bias = bias.detach().to(dtype, copy=True).requires_grad_()
        return Model(leaves[0], OutputHead(leaves[1], bias, self.head.transform))

    def leaves(self) -> list[Tensor]:
        """Return hidden, weight and, if there is one, bias."""
        bias = self.head.bias
        return [self.hidden, self.head.weight] if bias is None else [self.hidden, self.head.weight, bias]

    def log_softmax(self, vocab: int, temperature: float) -> Tensor:
        """Return the log-probs of the first `vocab` tokens from all logits at once: [N, vocab]."""
        logits = self.hidden @ self.head.weight.T
        if self.head.bias is not None:
            logits = logits + self.head.bias
        logits = logits * self.head.transform.scale
        softcap = self.head.transform.softcap
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return (logits[:, :vocab] / temperature).log_softmax(-1)


def make_model(
    seed: int,
    *,
    rows: int = 23,
    width: int = 16,
    columns: int = 32,
    bias: bool = False,
    transform: LogitTransform = _IDENTITY,
) -> Model:
    """Return a model of float32 with gradients, whose logits have a standard deviation of about 1."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(columns, width, generator=generator) / width**0.5
    head_bias = torch.randn(columns, generator=generator) if bias else None
    return Model(hidden, OutputHead(weight, head_bias, transform)).to(torch.float32)


def freeze_head(model: Model) -> Model:
    """Return the model with a frozen head."""
    return replace(model, head=OutputHead(model.head.weight.detach(), model.head.bias, model.head.transform))


def dense_divergence(log_p: Tensor, log_q: Tensor, divergence: Divergence) -> Tensor:
    """Return the divergence of each row, by its definition."""
    p = log_p.exp()
    q = log_q.exp()
    if divergence.kind == "reverse_kl":
        return (p * (log_p - log_q)).sum(-1)
    if divergence.kind == "forward_kl":
        return (q * (log_q - log_p)).sum(-1)
    beta = divergence.beta
    log_m = (beta * q + (1 - beta) * p).log()
    return beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)


def weigh(values: Tensor) -> Tensor:
    """Return the sum of the rows with weights from -1 to 2."""
    return (values * torch.linspace(-1, 2, len(values), dtype=values.dtype)).sum()


def assert_exact(
    values: Tensor, student: Model, expected: Tensor, expected_gradients: Sequence[Tensor], tolerance: float
) -> None:
    """Assert that the rows' divergences and the gradients of `weigh` are those computed in float64.

    student: the model of `values`. A gradient's tolerance is a share of its largest element, or of 1 if that is more.
    """
    torch.testing.assert_close(values.double(), expected.detach(), atol=tolerance, rtol=tolerance)
    gradients = torch.autograd.grad(weigh(values), student.leaves())
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        # A weight's gradient sums 23 rows.
        largest = max(1.0, float(expected_gradient.abs().max()))
        torch.testing.assert_close(gradient.double(), expected_gradient, atol=tolerance * largest, rtol=0)
