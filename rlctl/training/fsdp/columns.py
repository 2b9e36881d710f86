"""Columns that a pass without gradients computes for each token: log-probs, or the outputs of a value head."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlctl.training.fsdp.model import FsdpPolicy, free_gathered
from rlctl.training.interface import MicroBatch
from rlctl.training.packing import Packed, pack

# float32 [T] of each sequence of each micro-batch.
TokenColumns = list[list[NDArray[np.float32]]]


def compute_log_probs(model: FsdpPolicy, micro_batches: list[MicroBatch], device: torch.device) -> TokenColumns:
    """Return the log-prob of each token given those before it, 0 at the first token of a sequence."""

    def read(packed: Packed) -> Tensor:
        rows = packed.positions.nonzero()[:, 0]
        log_probs, _ = model(packed, rows)
        return torch.zeros(len(packed.tokens), device=device).index_copy_(0, rows, log_probs)

    return _compute_column(model, micro_batches, device, read)


def compute_values(model: FsdpPolicy, micro_batches: list[MicroBatch], device: torch.device) -> TokenColumns:
    """Return the output of the value head at each token. Raises ValueError for a model without value head."""
    if not model.has_value_head:
        raise ValueError(f"{model.facts.architecture} has no value head")

    def read(packed: Packed) -> Tensor:
        # The tokens before these rows are all tokens.
        rows = torch.arange(1, len(packed.tokens) + 1, device=device)
        values: Tensor = model(packed, rows)[0]
        return values

    return _compute_column(model, micro_batches, device, read)


def _compute_column(
    model: FsdpPolicy, micro_batches: list[MicroBatch], device: torch.device, read: Callable[[Packed], Tensor]
) -> TokenColumns:
    """Return the result of `read`, float32 [T] for a pack of T tokens, cut by sequence."""
    columns: TokenColumns = []
    for micro_batch in micro_batches:
        packed = pack(micro_batch, device)
        column = read(packed).cpu().numpy()
        columns.append(np.split(column, np.cumsum(packed.lengths)[:-1]) if micro_batch else [])
    # A forward pass leaves the root's weights gathered; a later change of the shards must not miss them.
    free_gathered(model)
    return columns
