"""A pack as a rank's stage takes it: filled up to a size that ranks can share, the rank's tokens, rotary tables."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlctl.training.megatron.attention import Pack
from rlctl.training.packing import Packed


@dataclass(frozen=True)
class Inputs:
    """tokens, positions: int64 [t], those of the pack from `first` on."""

    tokens: Tensor
    positions: Tensor
    first: int
    pack: Pack


class PackSlicer:
    """Cuts packs for rank `rank` of `ranks` context-parallel ones. multiple: divides the number of tokens.

    rotary: transformers' own rotary module of the model, so that every scaling it knows is known here.
    """

    def __init__(self, rotary: Any, dtype: torch.dtype, multiple: int, rank: int, ranks: int) -> None:
        self._rotary, self._dtype, self._multiple, self._rank, self._ranks = rotary, dtype, multiple, rank, ranks

    def __call__(self, packed: Packed) -> Inputs:
        """Tokens that fill up are a sequence of their own, which no loss looks at."""
        tokens, positions, cu_seqlens = packed.tokens, packed.positions, packed.cu_seqlens
        # Two tokens a rank at least, where the whole pack of a rank without work has two: torch.compile takes a single
        # one for a constant, and compiles for it while other ranks wait.
        filler = max(-len(tokens) % self._multiple, 2 * self._multiple - len(tokens))
        if filler:
            tokens = torch.cat((tokens, tokens.new_zeros(filler)))
            positions = torch.cat((positions, torch.arange(filler, device=positions.device)))
            cu_seqlens = torch.cat((cu_seqlens, cu_seqlens[-1:] + filler))
        cos, sin = self._rotary(torch.empty(0, dtype=self._dtype, device=tokens.device), positions[None])
        size = len(tokens) // self._ranks
        own = slice(self._rank * size, (self._rank + 1) * size)
        pack = Pack(
            qkv_format="thd", cu_seqlens=cu_seqlens, max_len=max(packed.max_len, filler), cos=cos[0], sin=sin[0]
        )
        return Inputs(tokens[own], positions[own], own.start, pack)
