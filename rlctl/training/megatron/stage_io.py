"""Input and output of a rank's pipeline stage: its part of a pack, and log-probs from the last hidden states."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from rlctl.preflight.trainer_settings import TrainerSettings
from rlctl.training.logprobs import Split, chunked_log_probs
from rlctl.training.megatron.attention import Pack
from rlctl.training.megatron.model import MegatronPolicy
from rlctl.training.packing import Packed


@dataclass(frozen=True)
class Inputs:
    """This rank's t tokens of a pack, which begin at row `first` of the pack."""

    # int64 [t].
    tokens: Tensor
    # int64 [t]: position of each token in its sequence, from 0.
    positions: Tensor
    first: int
    # Description of the whole pack, for attention.
    pack: Pack


class PackSlicer:
    """Cuts out the part of each pack that context-parallel rank `rank` of `ranks` computes.

    A pack is first padded, so that all ranks get equally many tokens.
    """

    def __init__(self, rotary: Any, dtype: torch.dtype, multiple: int, rank: int, ranks: int) -> None:
        """rotary: transformers' rotary embedding of the model. multiple: the padded size is a multiple of this."""
        self._rotary = rotary
        self._dtype = dtype
        self._multiple = multiple
        self._rank = rank
        self._ranks = ranks

    def __call__(self, packed: Packed) -> Inputs:
        """Return this rank's part of the pack. Padding tokens form one more sequence, which no loss reads."""
        tokens = packed.tokens
        positions = packed.positions
        cu_seqlens = packed.cu_seqlens
        # Each rank gets at least two tokens. A rank without sequences has a pack of two tokens, which may be one token
        # on each rank: torch.compile treats a size of one as a constant, and would recompile while other ranks wait.
        filler = max(-len(tokens) % self._multiple, 2 * self._multiple - len(tokens))
        if filler:
            tokens = torch.cat((tokens, tokens.new_zeros(filler)))
            positions = torch.cat((positions, torch.arange(filler, device=positions.device)))
            cu_seqlens = torch.cat((cu_seqlens, cu_seqlens[-1:] + filler))
        cos, sin = self._rotary(torch.empty(0, dtype=self._dtype, device=tokens.device), positions[None])
        size = len(tokens) // self._ranks
        first = self._rank * size
        part = slice(first, first + size)
        pack = Pack(
            qkv_format="thd", cu_seqlens=cu_seqlens, max_len=max(packed.max_len, filler), cos=cos[0], sin=sin[0]
        )
        return Inputs(tokens=tokens[part], positions=positions[part], first=first, pack=pack)


class Head:
    """Computes log-probs and entropy from the last stage's hidden states, at the sampling temperature.

    With tensor parallelism a rank has the logits of a part of the vocabulary, with context parallelism only some tokens
    of the pack. Every rank gets the whole result.
    """

    def __init__(self, policy: MegatronPolicy, section: TrainerSettings, temperature: float) -> None:
        self._policy = policy
        self._section = section
        self._temperature = temperature
        self._context = parallel_state.get_context_parallel_group()

    def __call__(self, hidden: Tensor, inputs: Inputs, packed: Packed, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs and the entropy, both float32 [T], at `rows` of the pack and 0 elsewhere.

        All ranks of the stage get equal results. hidden: [t, 1, hidden] of this rank's tokens; with sequence
        parallelism only its share of the t rows. rows: int64 rows of the pack, without first tokens of sequences.
        """
        # Row i's log-prob comes from the hidden state of row i - 1, so a rank computes the rows after its own tokens.
        rank_rows = rows[(rows > inputs.first) & (rows <= inputs.first + len(inputs.tokens))]
        # The reshape must come before the collective, because Megatron does not sum a gradient that is not contiguous.
        flat = hidden.reshape(-1, hidden.shape[-1])
        weight = self._policy.head()
        sequence_parallel = self._policy.config.sequence_parallel
        # [t, hidden]. In the backward pass its gradient is summed over the tensor-parallel ranks.
        collect = gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region
        whole_hidden: Tensor = collect(flat)
        split = None
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
            split = Split(parallel_state.get_tensor_model_parallel_group(), first)
        log_probs, entropy = chunked_log_probs(
            whole_hidden.index_select(0, rank_rows - 1 - inputs.first),
            weight,
            packed.tokens[rank_rows],
            self._temperature,
            self._section.logprob_chunk_tokens,
            compiled=self._section.compile,
            split=split,
            kept_rows=self._section.logprob_kept_tokens,
        )
        return self._place_rows(log_probs, packed, rank_rows), self._place_rows(entropy, packed, rank_rows)

    def _place_rows(self, numbers: Tensor, packed: Packed, rows: Tensor) -> Tensor:
        """Return float32 [T]: `numbers` at `rows`, summed over context-parallel ranks, each of which has other rows.

        A rank's gradient covers only its rows.
        """
        rank_numbers = numbers.new_zeros(len(packed.tokens)).index_copy(0, rows, numbers)
        all_numbers: Tensor = reduce_from_tensor_model_parallel_region(rank_numbers, group=self._context)
        return all_numbers
