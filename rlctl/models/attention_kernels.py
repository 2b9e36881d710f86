"""Implementations of packed attention: flash and flex attention on GPUs; SDPA and blocks of rows on any device.

Shapes are those of `packed_attention`: queries [T, heads, dim], keys [T, kv_heads, dim], values [T, kv_heads, v_dim].
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

# Largest head size that the flash kernel supports (FlashAttention 2 and 3).
FLASH_MAX_DIM = 256
# Most attention scores in one block of query rows: 64 MiB in float32.
_BLOCK_SCORES = 2**24
# Rows and columns of a tile. Flex attention computes or skips whole tiles.
_TILE = 128
# Tokens of the smallest padded pack for which flex attention is compiled.
_SMALLEST = 1024


def _varlen_options() -> dict[str, Any]:
    """Return the kernel's arguments for causality (torch 2.10: is_causal, later: window_size) and for GQA."""
    parameters = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    if "enable_gqa" in parameters:
        options["enable_gqa"] = False
    return options


# Read once, because compiled code must not inspect a signature.
_VARLEN = _varlen_options()
FLASH_HAS_WINDOWS = "window_size" in _VARLEN


def flash(
    queries: Tensor, keys: Tensor, values: Tensor, cu_seqlens: Tensor, max_len: int, scale: float, window: int | None
) -> Tensor:
    """Compute attention by torch's variable-length flash kernel, in half precision, with heads up to FLASH_MAX_DIM.

    The kernel needs one head size for queries, keys and values, a multiple of 8. Shorter heads are padded with zeros.
    """
    options = dict(_VARLEN)
    repeat = queries.shape[1] // keys.shape[1]
    v_dim = values.shape[2]
    if window is not None:
        options["window_size"] = (window - 1, 0)
    if "enable_gqa" in options:
        options["enable_gqa"] = repeat > 1
    elif repeat > 1:
        keys = keys.repeat_interleave(repeat, 1)
        values = values.repeat_interleave(repeat, 1)
    width = -(-max(queries.shape[2], v_dim) // 8) * 8
    attend: Any = varlen_attn
    queries = _pad_heads(queries, width)
    keys = _pad_heads(keys, width)
    values = _pad_heads(values, width)
    out: Tensor = attend(queries, keys, values, cu_seqlens, cu_seqlens, max_len, max_len, scale=scale, **options)
    return out[..., :v_dim]


def _pad_heads(heads: Tensor, width: int) -> Tensor:
    return heads if heads.shape[2] == width else F.pad(heads, (0, width - heads.shape[2]))


def attend_groups(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention with one padded call for each group of sequences of similar length (factor of at most two).

    Exact, because causal attention never sees padding after the tokens. Works on any device, dtype and head size.
    """
    if softcap is None and sinks is None:
        attend = partial(_sdpa, scale=scale, window=window)
    else:
        attend = partial(_row_blocks, scale=scale, window=window, softcap=softcap, sinks=sinks)
    if int(cu_seqlens.diff().min()) == max_len:
        batch = [heads.view(-1, max_len, *heads.shape[1:]) for heads in (queries, keys, values)]
        return attend(*batch).flatten(0, 1)
    out = values.new_empty(len(queries), queries.shape[1], values.shape[2])
    for rows, is_real in length_groups(cu_seqlens):
        readable_rows = rows.clamp(max=len(queries) - 1)
        padded = attend(queries[readable_rows], keys[readable_rows], values[readable_rows])
        out = out.index_copy(0, rows[is_real], padded[is_real])
    return out


def length_groups(cu_seqlens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (rows, is_real) for each group of sequences whose lengths differ by a factor of at most two.

    rows: int64 [S, L], token indices in the pack; padding is beyond a sequence's end. is_real: bool [S, L], not
    padding.
    """
    starts = cu_seqlens[:-1].long()
    lengths = cu_seqlens.diff().long()
    longest = int(lengths.max())
    while longest > 0:
        half = longest // 2
        chosen = ((lengths > half) & (lengths <= longest)).nonzero()[:, 0]
        if len(chosen):
            offsets = torch.arange(int(lengths[chosen].max()), device=cu_seqlens.device)
            yield starts[chosen, None] + offsets, offsets < lengths[chosen, None]
        longest = half


# torch.compile cannot handle shapes that depend on data.
attend_groups_eagerly: Callable[..., Tensor] = torch.compiler.disable(attend_groups)  # type: ignore[no-untyped-call]


def _sdpa(queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """Compute causal attention by SDPA. queries, keys, values: [S, L, heads, dim]; returns [S, L, heads, v_dim]."""
    length = queries.shape[1]
    mask: dict[str, Any] = {"is_causal": True}
    if window is not None and window < length:
        mask = {"attn_mask": _visible_keys(0, length, 0, window, queries.device)}
    out = F.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        scale=scale,
        enable_gqa=queries.shape[2] != keys.shape[2],
        **mask,
    )
    return out.transpose(1, 2)


def _row_blocks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute `_sdpa` with capped scores and sinks, one block of query rows at a time.

    The backward pass recomputes blocks. sinks: [heads], an extra logit in each softmax's denominator, without a value.
    """
    sequences, length, heads, _ = queries.shape
    kv_heads = keys.shape[2]
    queries = queries.transpose(1, 2).reshape(sequences, kv_heads, heads // kv_heads, length, -1)
    keys = keys.transpose(1, 2)[:, :, None]
    values = values.transpose(1, 2)[:, :, None]
    if sinks is not None:
        sinks = sinks.view(kv_heads, -1, 1, 1)
    rows = max(1, _BLOCK_SCORES // (sequences * heads * length))
    blocks = []
    for begin in range(0, length, rows):
        end = min(begin + rows, length)
        first = 0 if window is None else max(0, begin - window + 1)
        is_visible = _visible_keys(begin, end, first, window, queries.device)
        attend = partial(_attend_block, is_visible=is_visible, scale=scale, softcap=softcap)
        inputs = (queries[..., begin:end, :], keys[..., first:end, :], values[..., first:end, :], sinks)
        if rows >= length:
            blocks.append(attend(*inputs))
        else:
            blocks.append(checkpoint(attend, *inputs, use_reentrant=False))
    return torch.cat(blocks, -2).flatten(1, 2).transpose(1, 2)


def _attend_block(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    *,
    is_visible: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    scores = (queries @ keys.mT).to(torch.promote_types(queries.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~is_visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    return scores.softmax(-1)[..., : keys.shape[-2]].to(values.dtype) @ values


def _visible_keys(begin: int, end: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [end - begin, end - first]: True where query row `begin + i` sees key `first + j`."""
    distance = torch.arange(begin, end, device=device)[:, None] - torch.arange(first, end, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def flex(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention by torch's flex attention, compiled for GPUs, with capped scores, sinks and any window.

    Packs are padded to a power of two tokens, so that few shapes are compiled. With z a row's logsumexp, a sink s
    changes the softmax's denominator from exp(z) to exp(z) + exp(s): the output is multiplied by sigmoid(z - s).
    """
    from torch.nn.attention.flex_attention import AuxRequest

    tokens = len(queries)
    size = max(_SMALLEST, 1 << (tokens - 1).bit_length())
    out, aux = _compiled_flex()(
        _pad_tokens(queries, size),
        _pad_tokens(keys, size),
        _pad_tokens(values, size),
        score_mod=None if softcap is None else _make_cap(softcap),
        block_mask=_block_mask(cu_seqlens, size, window),
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        out = out * (aux.lse - sinks.float()[:, None]).sigmoid()[..., None].to(out.dtype)
    attended: Tensor = out[0].transpose(0, 1)[:tokens]
    return attended


def _pad_tokens(heads: Tensor, size: int) -> Tensor:
    """Return `heads` [T, heads, dim], padded to `size` tokens, as [1, heads, size, dim]."""
    return F.pad(heads, (0, 0, 0, 0, 0, size - len(heads))).transpose(0, 1)[None]


# Flex attention is compiled separately: its block mask is created outside of a compiled graph.
flex_eagerly: Callable[..., Tensor] = torch.compiler.disable(flex)  # type: ignore[no-untyped-call]


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@cache
def _make_cap(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


# Cached: layers with the same window share a mask, and the layers of a pass get the same `cu_seqlens` tensor.
@lru_cache(maxsize=4)
def _block_mask(cu_seqlens: Tensor, size: int, window: int | None) -> Any:
    """Return flex attention's block mask for a pack padded to `size` tokens. A padding token sees only itself.

    `first` has each row's first visible key and never decreases, so two comparisons decide if a tile has any or only
    visible scores. The window is data: one compiled kernel serves all windows.
    """
    from torch.nn.attention.flex_attention import BlockMask

    rows = torch.arange(size, device=cu_seqlens.device, dtype=torch.int32)
    sequences = torch.bucketize(rows, cu_seqlens, right=True, out_int32=True)
    starts = torch.cat((cu_seqlens, cu_seqlens[-1:]))[sequences.clamp(min=1) - 1]
    first = torch.where(rows < cu_seqlens[-1], starts, rows)
    if window is not None:
        first = first.maximum(rows - (window - 1))

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key <= query)

    tiles = torch.arange(size // _TILE, device=rows.device)
    has_any = (tiles[:, None] >= tiles) & ((tiles + 1) * _TILE > first[::_TILE, None])
    has_all = (tiles[:, None] > tiles) & (tiles * _TILE >= first[_TILE - 1 :: _TILE, None])
    partial_counts, partial_columns = _list_columns(has_any & ~has_all)
    full_counts, full_columns = _list_columns(has_all)
    return BlockMask.from_kv_blocks(
        kv_num_blocks=partial_counts,
        kv_indices=partial_columns,
        full_kv_num_blocks=full_counts,
        full_kv_indices=full_columns,
        BLOCK_SIZE=_TILE,
        mask_mod=is_visible,
        seq_lengths=(size, size),
    )


def _list_columns(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return (number of chosen columns in each row, all columns of the row, chosen first), int32 [1, 1, ...]."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True).int()
    return chosen.sum(-1, dtype=torch.int32)[None, None], order[None, None]
