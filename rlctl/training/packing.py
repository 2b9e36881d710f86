"""Packs: the sequences of a micro-batch, concatenated to flat tensors without padding. Also torch.compile for packs.

`micro_batching.py` assigns sequences to micro-batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlctl.preflight.declared_columns import column_of
from rlctl.training.interface import MicroBatch, TokenBatch
from rlctl.training.micro_batching import TrainingSample, rollout_index

# Content of an empty micro-batch. It has two tokens, because torch.compile treats a size of 1 as a constant, and would
# compile everything again.
_MASKED_PAIR = TrainingSample(tokens=np.zeros(2, np.int32), mask=np.zeros(2, np.bool_))


@dataclass(frozen=True)
class Packed:
    """A pack on the device: T tokens of S sequences, which belong to R rollouts."""

    # int64 [T]: token ids.
    tokens: Tensor
    # int64 [T]: position of each token in its sequence, from 0.
    positions: Tensor
    # int64 [T]: index of each token's sequence.
    sequence: Tensor
    # int64 [T]: index of each token's rollout. The same tensor as `sequence` if each rollout is one sequence.
    rollout: Tensor
    # R.
    num_rollouts: int
    # bool [T]: true at the tokens to train on, false at each sequence's first token.
    mask: Tensor
    # Name -> [T, *shape].
    columns: dict[str, Tensor]
    # int32 [S + 1]: row of the pack at which each sequence begins, then T.
    cu_seqlens: Tensor
    # Number of tokens of the longest sequence.
    max_len: int
    # Number of tokens of each sequence.
    lengths: tuple[int, ...]


def pack(micro_batch: MicroBatch, device: torch.device) -> Packed:
    """Concatenate the sequences of a micro-batch, in their order, on `device`.

    An empty micro-batch becomes a pack of two masked tokens, so that its rank joins the collectives of a pass. Raises
    ValueError for an empty sequence, or if sequences differ in the names of their columns.
    """
    micro_batch = micro_batch or [_MASKED_PAIR]
    lengths = np.array([len(sample) for sample in micro_batch])
    if lengths.min() < 1:
        raise ValueError(f"sequence {int(lengths.argmin())} of the micro-batch has no tokens")
    names = list(micro_batch[0].columns)
    if any(sample.columns.keys() != set(names) for sample in micro_batch):
        raise ValueError(f"sequences of a micro-batch differ in their columns: {sorted(names)} expected")
    starts = np.concatenate([[0], lengths.cumsum()])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    tokens = np.concatenate([sample.tokens for sample in micro_batch]).astype(np.int64)
    mask = np.concatenate([sample.mask for sample in micro_batch]).astype(bool) & (positions > 0)
    columns = {name: np.concatenate([sample.columns[name] for sample in micro_batch]) for name in names}
    rollouts = rollout_index([sample.rollout for sample in micro_batch])

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    sequence = put(np.repeat(np.arange(len(lengths)), lengths))
    num_rollouts = int(rollouts.max()) + 1
    return Packed(
        tokens=put(tokens),
        positions=put(positions),
        sequence=sequence,
        rollout=sequence if num_rollouts == len(lengths) else put(np.repeat(rollouts, lengths)),
        num_rollouts=num_rollouts,
        mask=put(mask),
        columns={name: put(column.astype(column_of(name).dtype)) for name, column in columns.items()},
        cu_seqlens=put(starts.astype(np.int32)),
        max_len=int(lengths.max()),
        lengths=tuple(lengths.tolist()),
    )


def token_batch(
    packed: Packed,
    log_probs: Tensor,
    entropy: Tensor,
    divergence: Tensor | None = None,
    values: Tensor | None = None,
) -> TokenBatch:
    """Return the input of a loss for a pack. log_probs, entropy: float32 [T], the policy's at each token.

    divergence: float32 [T], from the teacher; None if the loss needs none. values: float32 [T], of a value head; None
    for a causal LM.
    """
    return TokenBatch(
        log_probs=log_probs,
        entropy=entropy,
        mask=packed.mask,
        columns=packed.columns,
        sequence=packed.sequence,
        num_sequences=len(packed.lengths),
        rollout=packed.rollout,
        num_rollouts=packed.num_rollouts,
        divergence=divergence,
        values=values,
    )


# Largest number of graphs that torch may compile for one function. A norm needed 11: for hidden states and for heads,
# with and without gradient, recomputed or not (Qwen3 under Megatron, torch 2.13). Beyond torch's default of 8 the
# function would silently run uncompiled.
_VARIANTS = 64


def compile_for_packs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, compiled with dynamic sizes: a pack with another number of tokens needs no new graph."""
    from torch._dynamo import config
    from torch._inductor import config as inductor

    config.recompile_limit = max(config.recompile_limit, _VARIANTS)
    # Treat floats, such as a norm's epsilon, as constants. As inputs, some floats need a kernel on the host, and a C++
    # compiler takes minutes to build it (gpt_oss, torch 2.11).
    config.specialize_float = True
    # Switch off the fusion of a norm's two reductions. Inductor decides on it by the size of the pack, and compiles
    # again, 10 s each, for packs below 4096 tokens and below 5 Mi elements (MixOrderReduction in
    # inductor/scheduler.py; pytorch pull request 171941).
    options: dict[str, Any] = {}
    if hasattr(inductor.triton, "mix_order_reduction"):
        options["triton.mix_order_reduction"] = False
    # Switch off padded strides, because of a bug: Inductor wrote queries without padding and read them with padding.
    # The last 3 of 63 tokens were garbage (qwen3_moe, head size 32, torch 2.11).
    options["comprehensive_padding"] = False
    return torch.compile(function, dynamic=True, options=options)
