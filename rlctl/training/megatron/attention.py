"""Core attention of Megatron layers for packed sequences: all-to-all exchange, rotary embedding, `packed_attention`.

Context parallelism is that of DeepSpeed-Ulysses (arXiv 2309.14509). Outside attention each rank holds all heads of a
contiguous part of the pack's tokens. For attention an all-to-all gives it all tokens of a part of the heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rlctl.models.packed_attention import packed_attention


@dataclass
class Pack(PackedSeqParams):  # type: ignore[misc]
    """Inputs of attention that describe a pack: T tokens of S sequences, one sequence after the other."""

    # int32 [S + 1]: row of the pack at which each sequence begins, then T.
    cu_seqlens: Tensor | None = None
    # Tokens of the longest sequence.
    max_len: int = 0
    # [T, head_dim], compute dtype: cosines and sines of the rotary embedding at each token's position.
    cos: Tensor | None = None
    sin: Tensor | None = None


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention over q [t, heads, dim], k and v [t, kv_heads, dim]. This rank holds t tokens of the pack."""

    def __init__(self, config: Any, pg_collection: Any, **kwargs: Any) -> None:
        super().__init__(config=config)
        self._scale = config.kv_channels**-0.5
        self._group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.rotate: Callable[..., tuple[Tensor, Tensor]] = rotate_pair

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, packed_seq_params: Pack, **kwargs: Any
    ) -> Tensor:
        """Return the attention output [t, heads, dim]. A token attends to itself and its sequence's earlier tokens."""
        pack = packed_seq_params
        assert pack.cu_seqlens is not None and pack.cos is not None and pack.sin is not None
        if self._group:
            query = _gather_tokens(query, self._group)
            key = _gather_tokens(key, self._group)
            value = _gather_tokens(value, self._group)
        query, key = self.rotate(query, key, pack.cos, pack.sin)
        output = packed_attention(query, key, value, pack.cu_seqlens, pack.max_len, self._scale)
        return _gather_heads(output, self._group) if self._group else output


def rotate_pair(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the query and the key, each turned by `rotate_heads`."""
    return rotate_heads(query, cos, sin), rotate_heads(key, cos, sin)


def rotate_heads(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [T, heads, dim]: x cos + rotate_half(x) sin (RoFormer, arXiv 2104.09864)."""
    half = heads.shape[-1] // 2
    crossed = torch.cat((-heads[..., half:], heads[..., :half]), -1)
    return heads * cos[:, None] + crossed * sin[:, None]


def _gather_tokens(heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all heads of this rank's tokens, [t, heads, dim], for all tokens of its heads, [T, heads / ranks, dim].

    If there are fewer heads than ranks, heads are repeated until each rank has one.
    """
    ranks = dist.get_world_size(group)
    if heads.shape[1] < ranks:
        heads = heads.repeat_interleave(ranks // heads.shape[1], 1)
    parts = heads.view(len(heads), ranks, heads.shape[1] // ranks, heads.shape[2]).transpose(0, 1)
    return _exchange(parts, group).flatten(0, 1)


def _gather_heads(heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Undo `_gather_tokens`: exchange [T, heads / ranks, dim] for [t, heads, dim]."""
    ranks = dist.get_world_size(group)
    parts = heads.reshape(ranks, len(heads) // ranks, *heads.shape[1:])
    return _exchange(parts, group).transpose(0, 1).flatten(1, 2)


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    """All-to-all: sends parts[r] to rank r and receives result[r] from rank r.

    The exchange is its own inverse, so its gradient is the same exchange of the output's gradient.
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange(grads[0], ctx.group), None
