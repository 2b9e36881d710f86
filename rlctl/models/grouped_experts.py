"""Mixture of experts by grouped matrix products: one function for all model families, registered with transformers.

Token copies are sorted by expert once, so that a layer needs two grouped products for all experts. No step waits for
the device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "rlctl_grouped"


def _take_rows(rows: Tensor, index: Tensor) -> Tensor:
    return rows[index]


# A custom op, so that Inductor does not compile it: its kernel took 1.4 ms for 131,072 rows of 2,048 numbers (H100),
# PyTorch's own takes 0.36 ms.
take_rows: Callable[[Tensor, Tensor], Tensor] = torch.library.custom_op(
    "rlctl::take_rows", _take_rows, mutates_args=(), schema="(Tensor rows, Tensor index) -> Tensor"
)
# `shape[0]`, because `len` gives a plain int, and the graph would be compiled for that size only.
torch.library.register_fake("rlctl::take_rows", lambda rows, index: rows.new_empty(index.shape[0], *rows.shape[1:]))


class _Spread(torch.autograd.Function):
    """Copy every token once for each of its experts, sorted by expert.

    The backward pass gathers a token's rows and adds them. PyTorch's gradient of an index sorts all rows again or uses
    atomic additions, because an index may repeat. Both are many times slower.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.copies = copies
        return take_rows(tokens, order // copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        return _sum_copies(grad, place, ctx.copies), None, None, None


class _Collect(torch.autograd.Function):
    """Sum each token's rows, which are sorted by expert. This is the transpose of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return _sum_copies(rows, place, copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return take_rows(grad, order // ctx.copies), None, None, None


def _sum_copies(rows: Tensor, place: Tensor, copies: int) -> Tensor:
    """Sum the `copies` rows of every token in float32. rows: [T * copies, ...], sorted by expert; place: row index of
    each copy.
    """
    by_token: Tensor = take_rows(rows, place).view(-1, copies, *rows.shape[1:])
    return by_token.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)


def grouped_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of every token's experts.

    experts: transformers' module with the stacked matrices of E experts. hidden: [T, h]; chosen: int64 [T, k], expert
    indices; weights: [T, k]. Returns [T, h] in the dtype of `hidden`.

    An expert's output is linear in its gated activation, so the router's weight multiplies the activation. It has fewer
    columns, and the backward pass keeps it anyway.
    """
    copies = chosen.shape[1]
    expert, order = chosen.flatten().sort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    groups = _group_rows(expert, experts.num_experts)
    spread: Any = _Spread.apply
    collect: Any = _Collect.apply
    weight = spread(weights.flatten(), order, place, 1)[:, None]

    name = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _linear(experts, name, spread(hidden, order, place, copies), groups)
    active = (experts._apply_gate if experts.has_gate else experts.act_fn)(inner) * weight
    rows = _linear(experts, "down_proj", active, groups, weight)
    collected: Tensor = collect(rows, order, place, copies)
    return collected.to(hidden.dtype)


def _linear(experts: Any, name: str, rows: Tensor, groups: "_Groups", weight: Tensor | None = None) -> Tensor:
    """Multiply each row by its expert's matrix `name`. rows: [S, in]; weight: [S, 1], factor of the bias."""
    matrices: Tensor = getattr(experts, name)
    matrices = matrices if experts.is_transposed else matrices.transpose(1, 2)
    out = grouped_mm(rows.to(matrices.dtype), matrices, groups.ends)
    if experts.has_bias:
        # The bias is a product with a one-hot matrix, because the gradient of a look-up sorts all rows.
        factors = groups.one_hot().to(out.dtype)
        if weight is not None:
            factors = (factors * weight).to(out.dtype)
        out = out + factors @ getattr(experts, f"{name}_bias")
    return out


class _Groups(NamedTuple):
    """Rows sorted by expert."""

    # int64 [S]: expert of each row.
    expert: Tensor
    # int64 [E]: indices 0 to E - 1.
    experts: Tensor
    # int32 [E]: end of each expert's rows.
    ends: Tensor

    def one_hot(self) -> Tensor:
        """Return bool [S, E]: true where the row belongs to the expert."""
        return self.expert[:, None] == self.experts


def _group_rows(expert: Tensor, number: int) -> _Groups:
    experts = torch.arange(number, device=expert.device)
    return _Groups(expert, experts, torch.searchsorted(expert, experts, right=True, out_int32=True))


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its expert's matrix. rows: [S, in]; matrices: [E, in, out]; ends: int32 [E]."""
    if rows.dtype == torch.bfloat16:
        return _grouped_mm(rows, matrices, ends)
    return _uncompiled(rows, matrices, ends)


def _grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    product: Any = F.grouped_mm
    out: Tensor = product(rows, matrices, offs=ends)
    return out


# Inductor compiles grouped products only in bfloat16.
_uncompiled: Callable[..., Tensor] = torch.compiler.disable(_grouped_mm)  # type: ignore[no-untyped-call]


def register() -> str:
    """Register `grouped_experts` with transformers. Return the name to pass as `experts_implementation`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
    return NAME


def stacked_experts(module: nn.Module) -> list[nn.Parameter]:
    """Return a module's own parameters that are stacks of experts' matrices. A convolution's 3D weight is none."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return []
    parameters = module.parameters(recurse=False)
    return [parameter for parameter in parameters if parameter.ndim == 3 and min(parameter.shape) > 1]


def check_grouped(lm: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError if a GPU would compute the experts of a causal LM one by one, without grouped products."""
    stacked = [module for module in lm.modules() if stacked_experts(module)]
    if device.type != "cuda" or not stacked:
        return
    if ungrouped := next((module for module in stacked if not hasattr(module, "is_transposed")), None):
        name = type(ungrouped).__name__
        problem = f"{name} of transformers goes through them by itself; grouped products need its own interface"
    elif dtype != torch.bfloat16:
        kind = str(dtype).removeprefix("torch.")
        problem = f"grouped products are bfloat16, not {kind}; set trainer.dtype=bfloat16"
    elif (capability := torch.cuda.get_device_capability(device)) < (9, 0):
        have = ".".join(map(str, capability))
        problem = f"grouped products need compute capability 9.0 (H100), not {have}; try trainer.backend=megatron"
    else:
        return
    raise ValueError(f"this GPU would multiply the experts of {lm.config.model_type} one at a time: {problem}")
