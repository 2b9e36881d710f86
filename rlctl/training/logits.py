"""A head's logits, a chunk of rows at a time: product, transform, temperature, gradients, compiled code."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlctl.models.layer_kinds import LogitTransform
from rlctl.training.packing import compile_for_packs

# Temperature, and the scale and softcap of the logits' transform.
Tempering = tuple[float, float, float | None]


@dataclass(frozen=True)
class OutputHead:
    """A model's last layer, from hidden states [N, h] to logits [N, vocab]: transform(hidden @ weight.T + bias)."""

    # [vocab, h], whole on this rank.
    weight: Tensor
    # [vocab].
    bias: Tensor | None
    transform: LogitTransform

    def cut(self, columns: int) -> "OutputHead":
        """Return the head of the first `columns` tokens. It shares this head's memory."""
        bias = None if self.bias is None else self.bias[:columns]
        return OutputHead(self.weight[:columns], bias, self.transform)

    def copy(self) -> "OutputHead":
        """Return the same head, without gradients, in memory of its own."""
        bias = None if self.bias is None else self.bias.detach().clone()
        return OutputHead(self.weight.detach().clone(), bias, self.transform)

    def tempering(self, temperature: float) -> Tempering:
        """Return the steps from the product to the tempered logits."""
        return temperature, self.transform.scale, self.transform.softcap


def widen(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a softmax: float32, or float64 for logits of float64."""
    return torch.promote_types(dtype, torch.float32)


# Rows of a weight that are converted at a time.
_ROWS = 1 << 13


def multiply_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return hidden @ weight.T + bias, in float32 where `hidden` alone is: the whole weight need not fit twice."""
    if hidden.dtype == weight.dtype:
        return F.linear(hidden, weight, bias)
    logits = torch.cat([F.linear(hidden, rows.to(hidden.dtype)) for rows in torch.split(weight, _ROWS)], -1)
    return logits if bias is None else logits + bias


def transform_logits(logits: Tensor, tempering: Tempering) -> Tensor:
    """Return the transform of logits, float32 (float64 stays), perhaps in their own memory."""
    _, scale, softcap = tempering
    logits = logits.to(widen(logits.dtype))
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def temper_logits(logits: Tensor, tempering: Tempering) -> Tensor:
    """Return the transform of logits over the temperature: float32 (float64 stays), memory of its own."""
    return transform_logits(logits, tempering) / tempering[0]


def untemper_gradient(grad: Tensor, transformed: Tensor, tempering: Tempering) -> Tensor:
    """Return the gradient of the head's product from that of the tempered logits, perhaps in the memory of `grad`.

    transformed: the result of `transform_logits`.
    """
    temperature, scale, softcap = tempering
    if softcap is not None:
        grad = grad * (1 - (transformed / softcap).square())
    if scale != 1.0:
        grad = grad * scale
    return grad.div_(temperature)


class HeadGradients:
    """Gradients of a head and of its input, added up over the chunks of all rows."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, bool]) -> None:
        """Begin with the head's gradients at 0. needed: True for weight and for bias, if each is trained.

        A frozen head's gradients would cost a product, and memory for float32 numbers.
        """
        needs_weight, needs_bias = needed
        self._input = hidden
        self._head_weight = weight
        self._hidden = torch.empty_like(hidden)
        self._weight = torch.zeros_like(weight, dtype=widen(weight.dtype)) if needs_weight else None
        self._bias = torch.zeros_like(bias, dtype=widen(weight.dtype)) if needs_bias and bias is not None else None

    def add(self, rows: slice, grad: Tensor) -> None:
        """Add a chunk. grad: [rows, columns], the gradient of the product at the head's first columns."""
        columns = grad.shape[1]
        self._hidden[rows] = grad @ self._head_weight[:columns]
        if self._weight is not None:
            add_product(self._weight[:columns], grad.T, self._input[rows])
        if self._bias is not None:
            self._bias[:columns] += grad.sum(0, dtype=self._bias.dtype)

    def read(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of hidden, weight and bias, in the dtypes of hidden and weight."""
        dtype = self._head_weight.dtype
        weight = None if self._weight is None else self._weight.to(dtype)
        bias = None if self._bias is None else self._bias.to(dtype)
        return self._hidden, weight, bias


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, float32; on a GPU within the product, which then rounds nothing."""
    if total.is_cuda and left.dtype == torch.bfloat16 and _adds_in_product(total.device):
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    else:
        total += left @ right


@cache
def _adds_in_product(device: torch.device) -> bool:
    """Return True if this torch adds a product of bfloat16 to float32 numbers on the device."""
    total = torch.ones(16, 16, device=device)
    part = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    try:
        torch.ops.aten.addmm.dtype_out(total, part.T, part, torch.float32, out=total)
    except (RuntimeError, AttributeError):
        return False
    return bool((total == 17).all())


@cache
def compile_for_chunks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function whose first argument is a chunk of logits; further arguments of that shape are chunks too."""
    # The last chunk of every pack has another size.
    fused = compile_for_packs(function)

    def run_on_chunk(logits: Tensor, *arguments: Any) -> Any:
        # torch.compile treats a size of 1 as a constant, and would compile again for 10 s for a single row.
        if len(logits) == 1:
            return function(logits, *arguments)
        copies = []
        for argument in (logits, *arguments):
            if not isinstance(argument, Tensor):
                copies.append(argument)
            elif argument.shape == logits.shape:
                # A constant, so that no division by an unknown size finds the place of a logit.
                torch._dynamo.mark_static(argument, 1)  # type: ignore[no-untyped-call]
                copies.append(argument)
            else:
                # A copy, because for a view torch.compile reads the size of the whole tensor, and would compile again
                # for 10 s for the first pack of one chunk, and for the first pack of several chunks.
                copies.append(argument.clone())
        return fused(*copies)

    return run_on_chunk
