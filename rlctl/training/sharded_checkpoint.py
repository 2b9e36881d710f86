"""Checkpoints of tensors that ranks hold parts of, as safetensors in the form of torch DCP: nothing is pickled.

`rank_checkpoint.py` writes them: every rank its boxes, into one file. Any number of ranks, on any layout, each reads
its own boxes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from rlctl.training.rank_checkpoint import TensorShard


def load_shards(folder: Path, shards: Mapping[str, TensorShard]) -> None:
    """Fill every shard in place; all ranks together. Raises OSError with the first rank's reason."""
    state: dict[str, Any] = {name: shard.tensor for name, shard in shards.items()}
    try:
        dcp_load(state, storage_reader=HuggingFaceStorageReader(str(folder)), planner=_Loading(shards))
    except CheckpointException as error:
        raise OSError(f"{_first(error)} from {folder}") from error


def load_progress(folder: Path) -> int:
    """Set this rank's RNG state, and return the number of updates.

    A rank that did not exist when the state was saved takes rank 0's RNG state. Raises FileNotFoundError if `folder`
    holds no state.
    """
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"{folder} holds no trainer state")
    names = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    own = f"rng.{dist.get_rank()}"
    updates, rng = torch.tensor(0), torch.zeros_like(torch.get_rng_state())
    found = {"updates": updates, own if own in names else "rng.0": rng}
    load_shards(folder, {name: TensorShard.whole(tensor) for name, tensor in found.items()})
    torch.set_rng_state(rng)
    return int(updates)


def _first(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank} could not read: {cause}"


class _Loading(DefaultLoadPlanner):
    """Reads into each tensor the part of a larger one that it is."""

    def __init__(self, shards: Mapping[str, TensorShard]) -> None:
        super().__init__()
        self._shards = shards

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata
        stored = self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        for name, shard in self._shards.items():
            if name not in stored:
                raise KeyError(f"{name} is not in this checkpoint")
            found = stored[name]
            assert isinstance(found, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(offsets=torch.Size(shard.start), sizes=shard.tensor.size())
            items += create_read_items_for_chunk_list(name, found, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.state_dict[index.fqn]
        return tensor
