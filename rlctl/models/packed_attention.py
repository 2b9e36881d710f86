"""Causal attention over packed sequences: one function for all training backends, registered with transformers.

Each call uses the fastest implementation in `attention_kernels.py` that supports it. In half precision on a GPU this is
torch's variable-length flash kernel, or flex attention for capped scores and sinks. Elsewhere it is exact SDPA or
blocks of rows.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rlctl.models.attention_kernels import (
    FLASH_HAS_WINDOWS,
    FLASH_MAX_DIM,
    attend_groups_eagerly,
    flash,
    flex_eagerly,
)

NAME = "rlctl_packed"
# Keywords of transformers that have no effect here: they are about caches, outputs and other layers.
_UNUSED = frozenset(
    {
        *("cu_seq_lens_k", "max_length_k", "seq_idx", "position_ids", "cache_position", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    }
)


def packed_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention within each sequence of a pack.

    queries: [T, heads, dim]; keys: [T, kv_heads, dim]; values: [T, kv_heads, v_dim]; kv_heads divides heads.
    cu_seqlens: int32 [S + 1], begin of each sequence, then T. max_len: tokens of the longest sequence. scale: factor of
    the scores. window: number of tokens that a token sees, including itself: key j counts for query i if 0 <= i - j <
    window. softcap: c in c * tanh(score / c). sinks: [heads], an extra logit in each softmax's denominator, without a
    value. Returns [T, heads, v_dim].
    """
    is_half = queries.is_cuda and queries.dtype in (torch.float16, torch.bfloat16)
    if is_half and max(queries.shape[2], values.shape[2]) <= FLASH_MAX_DIM:
        if softcap is None and sinks is None and (window is None or FLASH_HAS_WINDOWS):
            return flash(queries, keys, values, cu_seqlens, max_len, scale, window)
        return flex_eagerly(queries, keys, values, cu_seqlens, scale, window, softcap, sinks)
    return attend_groups_eagerly(queries, keys, values, cu_seqlens, max_len, scale, window, softcap, sinks)


def register() -> str:
    """Register `packed_attention` with transformers. Return the name to pass as `attn_implementation`."""
    from transformers import AttentionInterface

    # No mask function is registered for this name. So transformers builds no mask, and does not search the positions
    # for sequences, which would wait for the device in every forward pass.
    AttentionInterface.register(NAME, transformers_attention)
    return NAME


def transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Call `packed_attention` with transformers' signature: query is [1, heads, T, dim], the result [1, T, heads,
    v_dim].

    Raises ValueError for a keyword whose value packed attention does not support.
    """
    refuse_keywords(module, attention_mask=attention_mask, dropout=dropout, is_causal=is_causal, **kwargs)
    out = packed_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seqlens=cu_seq_lens_q,
        max_len=max_length_q,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def refuse_keywords(module: nn.Module, *, dropout: float = 0.0, is_causal: bool | None = None, **kwargs: Any) -> None:
    """Raise ValueError for an attention module's keyword whose value would be ignored."""
    name = type(module).__name__
    if dropout:
        raise ValueError(f"{name} drops {dropout:g} of its attention: packed attention has no dropout")
    if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
        raise ValueError(f"{name} sees later tokens (is_causal is false): packed attention is causal")
    set_keywords = [key for key, setting in kwargs.items() if setting is not None and setting is not False]
    unknown = [key for key in set_keywords if key not in _UNUSED]
    if unknown:
        raise ValueError(f"{name} passes {', '.join(unknown)} to attention, which packed attention does not honour")
