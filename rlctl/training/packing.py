"""One micro-batch as flat tensors of concatenated sequences without padding; torch.compile for packs of every size.

`micro_batching.py` assigns sequences to micro-batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlctl.preflight.declared_columns import COLUMNS
from rlctl.training.interface import MicroBatch, TokenBatch
from rlctl.training.micro_batching import TrainingSample, rollout_index

# Two tokens, because torch.compile treats a size of 1 as a constant, and would compile everything again.
_MASKED_PAIR = TrainingSample(tokens=np.zeros(2, np.int32), mask=np.zeros(2, np.bool_))


@dataclass(frozen=True)
class Packed:
    """T tokens of S sequences of R rollouts, on the device."""

    # int64 [T]: ids, positions within their sequence, index of the sequence.
    tokens: Tensor
    positions: Tensor
    sequence: Tensor
    # int64 [T]: index of the rollout; `sequence` itself where each rollout has one row. R.
    rollout: Tensor
    num_rollouts: int
    # bool [T]: false at each sequence's first token.
    mask: Tensor
    # Name -> [T, *shape].
    columns: dict[str, Tensor]
    # int32 [S + 1]: where each sequence begins, and the end.
    cu_seqlens: Tensor
    # Tokens of the longest sequence, and of each; on the host.
    max_len: int
    lengths: tuple[int, ...]


def pack(micro_batch: MicroBatch, device: torch.device) -> Packed:
    """Pack the sequences in their order. An empty micro-batch becomes two masked tokens, so that collectives run.

    Raises ValueError for an empty sequence, or if sequences differ in the names of their columns.
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
        columns={name: put(column.astype(COLUMNS[name].dtype)) for name, column in columns.items()},
        cu_seqlens=put(starts.astype(np.int32)),
        max_len=int(lengths.max()),
        lengths=tuple(lengths.tolist()),
    )


def token_batch(packed: Packed, log_probs: Tensor, entropy: Tensor) -> TokenBatch:
    """Return the input of a loss for a pack. log_probs, entropy: float32 [T]."""
    return TokenBatch(
        log_probs=log_probs,
        entropy=entropy,
        mask=packed.mask,
        columns=packed.columns,
        sequence=packed.sequence,
        num_sequences=len(packed.lengths),
        rollout=packed.rollout,
        num_rollouts=packed.num_rollouts,
    )


# Graphs that one function may have. Norms of hidden states and of heads, with and without gradient, recomputed or not,
# had 11 (Qwen3 under Megatron, torch 2.13). Beyond torch's own limit of 8 the rest would silently run uncompiled.
_VARIANTS = 64


def compile_for_packs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without a graph for each new number of tokens or sequences: few graphs take arguments of every size."""
    from torch._dynamo import config
    from torch._inductor import config as inductor

    config.recompile_limit = max(config.recompile_limit, _VARIANTS)
    # Floats, such as a norm's epsilon, are constants. As inputs some need a kernel for the host, which a C++ compiler
    # builds in minutes (gpt_oss, torch 2.11).
    config.specialize_float = True
    # Without the fusion of a norm's two reductions. Inductor chooses it by the number of tokens, and compiles again for
    # packs below 4096 tokens and below 5 Mi numbers, 10 s each (MixOrderReduction in inductor/scheduler.py; pytorch
    # pull request 171941).
    options: dict[str, Any] = {}
    if hasattr(inductor.triton, "mix_order_reduction"):
        options["triton.mix_order_reduction"] = False
    # Static graphs may have padded strides. Inductor wrote queries without padding and read them with it: the last 3 of
    # 63 tokens were garbage (qwen3_moe, heads of 32, torch 2.11).
    options["comprehensive_padding"] = False
    return torch.compile(function, dynamic=True, options=options)
