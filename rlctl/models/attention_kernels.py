"""The forms of packed attention: flash and flex attention on a GPU, SDPA and row blocks everywhere.

Shapes are those of `packed_attention`: q [T, heads, dim], k [T, kv_heads, dim], v [T, kv_heads, v_dim].
"""

import inspect
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

# Largest head of the flash kernel (FlashAttention 2 and 3).
FLASH_MAX_DIM = 256
# Scores that one block of rows may have: 64 MiB in float32.
_BLOCK_SCORES = 2**24
# Rows and columns of a block that flex attention computes or skips.
_TILE = 128
# Tokens of the smallest shape that flex attention is compiled for.
_SMALLEST = 1024


def _varlen_options() -> dict[str, Any]:
    """Return the kernel's options for causality (torch 2.10: is_causal, later window_size) and GQA, where it has it."""
    known = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return causal | ({"enable_gqa": False} if "enable_gqa" in known else {})


# Found once: compiled code must not look.
_VARLEN = _varlen_options()
FLASH_HAS_WINDOWS = "window_size" in _VARLEN


def flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_len: int, scale: float, window: int | None
) -> Tensor:
    """Attend by torch's variable-length flash kernel: half precision, heads of at most FLASH_MAX_DIM.

    The kernel takes one head size for q, k and v, a multiple of 8: shorter heads are padded with zeros.
    """
    options, repeat, v_dim = _VARLEN, q.shape[1] // k.shape[1], v.shape[2]
    if window is not None:
        options = options | {"window_size": (window - 1, 0)}
    if "enable_gqa" in options:
        options = options | {"enable_gqa": repeat > 1}
    elif repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    width = -(-max(q.shape[2], v_dim) // 8) * 8
    q, k, v = (F.pad(x, (0, width - x.shape[2])) if x.shape[2] < width else x for x in (q, k, v))
    attend: Any = varlen_attn
    out: Tensor = attend(q, k, v, cu_seqlens, cu_seqlens, max_len, max_len, scale=scale, **options)
    return out[..., :v_dim]


def grouped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend by one padded call for all sequences whose lengths differ by a factor of at most two.

    Padding comes after the tokens, where causality hides it from them. Any device, dtype and head size; exact.
    """
    if softcap is None and sinks is None:
        attend = partial(_sdpa, scale=scale, window=window)
    else:
        attend = partial(_row_blocks, scale=scale, window=window, softcap=softcap, sinks=sinks)
    if int(cu_seqlens.diff().min()) == max_len:
        equal = [x.view(-1, max_len, *x.shape[1:]) for x in (q, k, v)]
        return attend(equal[0], equal[1], equal[2]).flatten(0, 1)
    out = v.new_empty(len(q), q.shape[1], v.shape[2])
    for rows, real in length_groups(cu_seqlens):
        within = rows.clamp(max=len(q) - 1)
        padded = attend(q[within], k[within], v[within])
        out = out.index_copy(0, rows[real], padded[real])
    return out


def length_groups(cu_seqlens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (rows, real) of sequences whose lengths differ by a factor of at most two.

    rows: int64 [S, L], tokens of the pack, beyond each sequence's end too; real: true where a token is its own.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    high = int(lengths.max())
    while high > 0:
        low = high // 2
        chosen = ((lengths > low) & (lengths <= high)).nonzero()[:, 0]
        if len(chosen):
            offsets = torch.arange(int(lengths[chosen].max()), device=cu_seqlens.device)
            yield starts[chosen, None] + offsets, offsets < lengths[chosen, None]
        high = low


# Shapes depend on data here, which torch.compile cannot follow.
grouped_eagerly: Callable[..., Tensor] = torch.compiler.disable(grouped)  # type: ignore[no-untyped-call]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend causally. q, k, v: [S, L, heads, dim]; returns [S, L, heads, v_dim]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    length, gqa = q.shape[2], q.shape[1] != k.shape[1]
    masked: dict[str, Any] = {"is_causal": True}
    if window is not None and window < length:
        masked = {"attn_mask": _seen(0, length, 0, window, q.device)}
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=gqa, **masked).transpose(1, 2)


def _row_blocks(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """`_sdpa` with capped scores and sinks, a block of query rows at a time; the backward pass repeats each block.

    sinks: [heads], one more logit in each softmax's sum, without a value.
    """
    sequences, length, heads, _ = q.shape
    kv_heads = k.shape[2]
    q = q.transpose(1, 2).reshape(sequences, kv_heads, heads // kv_heads, length, -1)
    k, v = (x.transpose(1, 2)[:, :, None] for x in (k, v))
    if sinks is not None:
        sinks = sinks.view(kv_heads, -1, 1, 1)
    rows = max(1, _BLOCK_SCORES // (sequences * heads * length))
    blocks = []
    for at in range(0, length, rows):
        end = min(at + rows, length)
        first = 0 if window is None else max(0, at - window + 1)
        inputs = q[..., at:end, :], k[..., first:end, :], v[..., first:end, :], sinks
        block = partial(_block, seen=_seen(at, end, first, window, q.device), scale=scale, softcap=softcap)
        blocks.append(block(*inputs) if rows >= length else checkpoint(block, *inputs, use_reentrant=False))
    return torch.cat(blocks, -2).flatten(1, 2).transpose(1, 2)


def _block(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, seen: Tensor, scale: float, softcap: float | None
) -> Tensor:
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    return scores.softmax(-1)[..., : k.shape[-2]].to(v.dtype) @ v


def _seen(at: int, end: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [end - at, end - first]: True where query row `at + i` sees key `first + j`."""
    back = torch.arange(at, end, device=device)[:, None] - torch.arange(first, end, device=device)
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend by torch's flex attention, compiled for a CUDA device: capped scores, sinks, any window.

    Packs are padded to a power of two, so that few shapes are compiled. With z the log of a row's sum of exp(scores),
    a sink s divides by exp(z) + exp(s): the output times sigmoid(z - s).
    """
    from torch.nn.attention.flex_attention import AuxRequest

    tokens = len(q)
    size = max(_SMALLEST, 1 << (tokens - 1).bit_length())
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, size - tokens)).transpose(0, 1)[None] for x in (q, k, v))
    out, aux = _compiled_flex()(
        q,
        k,
        v,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=_block_mask(cu_seqlens, size, window),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        out = out * (aux.lse - sinks.float()[:, None]).sigmoid()[..., None].to(out.dtype)
    attended: Tensor = out[0].transpose(0, 1)[:tokens]
    return attended


# It is compiled by itself: its block mask is made outside of any graph.
flex_eagerly: Callable[..., Tensor] = torch.compiler.disable(flex)  # type: ignore[no-untyped-call]


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


# All layers of a pack share a mask, one for each window; equal packs are the same tensor.
@lru_cache(maxsize=4)
def _block_mask(cu_seqlens: Tensor, size: int, window: int | None) -> Any:
    """Return flex attention's block mask of a pack padded to `size`; each padding token sees itself.

    `first`, the first key that a row sees, never falls, so that two comparisons tell of each block if any or all of
    its scores count. The window is data: one compiled kernel serves all.
    """
    from torch.nn.attention.flex_attention import BlockMask

    row = torch.arange(size, device=cu_seqlens.device, dtype=torch.int32)
    which = torch.bucketize(row, cu_seqlens, right=True, out_int32=True)
    starts = torch.cat((cu_seqlens, cu_seqlens[-1:]))[which.clamp(min=1) - 1]
    first = torch.where(row < cu_seqlens[-1], starts, row)
    if window is not None:
        first = first.maximum(row - (window - 1))

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key <= query)

    tile = torch.arange(size // _TILE, device=row.device)
    some = (tile[:, None] >= tile) & ((tile + 1) * _TILE > first[::_TILE, None])
    whole = (tile[:, None] > tile) & (tile * _TILE >= first[_TILE - 1 :: _TILE, None])
    parts = [_list_columns(chosen) for chosen in (some & ~whole, whole)]
    return BlockMask.from_kv_blocks(*parts[0], *parts[1], BLOCK_SIZE=_TILE, mask_mod=seen, seq_lengths=(size, size))


def _list_columns(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row the number of its chosen columns, and all columns, chosen ones first: int32 [1, 1, ...]."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True).int()
    return chosen.sum(-1, dtype=torch.int32)[None, None], order[None, None]
