"""Causal attention over packed sequences: one function for every backend, registered with transformers.

On a GPU in half precision it is torch's variable-length flash kernel. Elsewhere it is exact SDPA over sequences grouped
by length, so that hundreds of short ones cost a few calls.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

NAME = "rlctl_packed"


def _varlen_options() -> dict[str, Any]:
    """Return the kernel's options for causality (torch 2.10: is_causal, later window_size) and GQA, where it has it."""
    known = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return causal | ({"enable_gqa": False} if "enable_gqa" in known else {})


# Found once: compiled code must not look.
_VARLEN = _varlen_options()


def packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_len: int, scale: float) -> Tensor:
    """Attend causally within each sequence of a pack.

    q: [T, heads, dim]; k, v: [T, kv_heads, dim], kv_heads dividing heads; cu_seqlens: int32 [S + 1], where
    sequences begin; max_len: the longest; scale: factor of the scores. Returns [T, heads, dim].
    """
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return _grouped_eagerly(q, k, v, cu_seqlens, max_len, scale)
    options, repeat = _VARLEN, q.shape[1] // k.shape[1]
    if "enable_gqa" in options:
        options = options | {"enable_gqa": repeat > 1}
    elif repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    attend: Any = varlen_attn
    out: Tensor = attend(q, k, v, cu_seqlens, cu_seqlens, max_len, max_len, scale=scale, **options)
    return out


def _grouped(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_len: int, scale: float) -> Tensor:
    """Attend by one padded SDPA call for all sequences whose lengths differ by a factor of at most two.

    Padding comes after the tokens, where causality hides it from them, so no mask is needed.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    if int(lengths.min()) == max_len:
        equal = [x.view(-1, max_len, *x.shape[1:]) for x in (q, k, v)]
        return _sdpa(equal[0], equal[1], equal[2], scale).flatten(0, 1)
    out = torch.empty_like(q)
    high = max_len
    while high > 0:
        low = high // 2
        chosen = ((lengths > low) & (lengths <= high)).nonzero()[:, 0]
        if len(chosen):
            offsets = torch.arange(int(lengths[chosen].max()), device=q.device)
            rows = starts[chosen, None] + offsets
            real = offsets < lengths[chosen, None]
            within = rows.clamp(max=len(q) - 1)
            padded = _sdpa(q[within], k[within], v[within], scale)
            out = out.index_copy(0, rows[real], padded[real])
        high = low
    return out


# Its shapes depend on data, which torch.compile cannot follow.
_grouped_eagerly: Callable[..., Tensor] = torch.compiler.disable(_grouped)  # type: ignore[no-untyped-call]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend causally. q, k, v: [S, L, heads, dim]; returns [S, L, heads, dim]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa).transpose(1, 2)


def register() -> str:
    """Make `packed_attention` known to transformers. Return the name to give as `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _transformers_attention)
    # No mask is built: the kernel knows where sequences begin.
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    return NAME


def _transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Adapt transformers' signature: query [1, heads, T, dim] in, [1, T, heads, dim] out."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_attention(q, k, v, cu_seq_lens_q, max_length_q, scaling)[None], None
