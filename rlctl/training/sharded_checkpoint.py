"""Loads checkpoints of sharded tensors: safetensors files in the format of torch's distributed checkpoint (DCP).

In `rank_checkpoint.py` every rank writes its shards into one file. Any number of ranks with any sharding can load a
checkpoint: each rank reads only the shards that it needs. Nothing is pickled.
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
    """Fill every shard in place from the checkpoint in `folder`. All ranks call together.

    shards: tensor name -> shard to fill. Raises OSError on all ranks, with the reason of one rank that failed.
    """
    state: dict[str, Any] = {name: shard.tensor for name, shard in shards.items()}
    try:
        dcp_load(state, storage_reader=HuggingFaceStorageReader(str(folder)), planner=_ShardPlanner(shards))
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank} could not read: {cause} from {folder}") from error


def load_progress(folder: Path) -> int:
    """Set this rank's RNG state from the checkpoint, and return the number of updates made before it was saved.

    A rank that did not exist at the time of saving takes rank 0's RNG state. Raises FileNotFoundError if `folder` holds
    no state.
    """
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"{folder} holds no trainer state")
    names = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    rng_name = f"rng.{dist.get_rank()}"
    if rng_name not in names:
        rng_name = "rng.0"
    updates = torch.tensor(0)
    rng = torch.zeros_like(torch.get_rng_state())
    load_shards(folder, {"updates": TensorShard.from_whole(updates), rng_name: TensorShard.from_whole(rng)})
    torch.set_rng_state(rng)
    return int(updates)


class _ShardPlanner(DefaultLoadPlanner):
    """DCP load planner that reads into each shard its part of the whole tensor."""

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
            metadata = stored[name]
            assert isinstance(metadata, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(offsets=torch.Size(shard.start), sizes=shard.tensor.size())
            items += create_read_items_for_chunk_list(name, metadata, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.state_dict[index.fqn]
        return tensor
