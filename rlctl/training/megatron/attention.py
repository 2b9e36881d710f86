"""Megatron's core attention for packed sequences: rotary embedding, exchange of heads for tokens, `packed_attention`.

Context parallelism is Ulysses' (DeepSpeed-Ulysses, arXiv 2309.14509): each rank holds a contiguous part of a pack's
tokens, and for attention all tokens of its part of the heads.
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
    """A pack of T tokens and S sequences, as attention needs it."""

    # int32 [S + 1]: where the sequences begin, and the end.
    cu_seqlens: Tensor | None = None
    # Tokens of the longest sequence.
    max_len: int = 0
    # [T, head_dim], in the compute dtype: the rotary table of all tokens.
    cos: Tensor | None = None
    sin: Tensor | None = None


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """Attention of q [t, heads, dim], k and v [t, kv_heads, dim]: t tokens are this rank's part of the pack."""

    def __init__(self, config: Any, pg_collection: Any, **kwargs: Any) -> None:
        super().__init__(config=config)
        self._scale = config.kv_channels**-0.5
        self._group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.turn: Callable[..., tuple[Tensor, Tensor]] = turned

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, packed_seq_params: Pack, **kwargs: Any
    ) -> Tensor:
        """Return [t, heads, dim]: each token attends to the earlier tokens of its sequence."""
        pack = packed_seq_params
        assert pack.cu_seqlens is not None and pack.cos is not None and pack.sin is not None
        if self._group:
            query, key, value = (_whole_tokens(x, self._group) for x in (query, key, value))
        query, key = self.turn(query, key, pack.cos, pack.sin)
        out = packed_attention(query, key, value, pack.cu_seqlens, pack.max_len, self._scale)
        return _whole_heads(out, self._group) if self._group else out


def turned(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return both `rotated`."""
    return rotated(query, cos, sin), rotated(key, cos, sin)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [T, heads, dim] by its position: x cos + rotate_half(x) sin (RoFormer, arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    crossed = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos[:, None] + crossed * sin[:, None]


def _whole_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [t, heads, dim] of a part of the tokens for [T, heads / ranks, dim]; too few heads are repeated."""
    ranks = dist.get_world_size(group)
    if x.shape[1] < ranks:
        x = x.repeat_interleave(ranks // x.shape[1], 1)
    parts = x.view(len(x), ranks, x.shape[1] // ranks, x.shape[2]).transpose(0, 1)
    return _exchange(parts, group).flatten(0, 1)


def _whole_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [T, heads / ranks, dim] for [t, heads, dim]."""
    ranks = dist.get_world_size(group)
    parts = x.reshape(ranks, len(x) // ranks, *x.shape[1:])
    return _exchange(parts, group).transpose(0, 1).flatten(1, 2)


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    result: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """parts[r] goes to rank r, and result[r] comes from rank r. Its own inverse, so its own gradient."""

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
