"""Checkpoints of tensors that ranks hold parts of, through torch DCP as safetensors: nothing is pickled.

Every rank writes the boxes it holds into one file; any number of ranks, cut in any other way, reads what it needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save


@dataclass(frozen=True)
class TensorShard:
    """The part `tensor` of a whole tensor of `shape`, from `start` on."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: Tensor

    @classmethod
    def whole(cls, tensor: Tensor) -> "TensorShard":
        """All of a tensor."""
        return cls(tuple(tensor.shape), (0,) * tensor.ndim, tensor)


def save_shards(folder: Path, shards: Mapping[str, TensorShard]) -> None:
    """Called by all ranks together. Raises OSError with the first rank's reason, a full disk say."""
    write(folder, {name: shard.tensor for name, shard in shards.items()}, _Saving(shards))


def load_shards(folder: Path, shards: Mapping[str, TensorShard]) -> None:
    """Fill every box in place; called by all ranks together. Raises OSError with the first rank's reason."""
    fill(folder, {name: shard.tensor for name, shard in shards.items()}, _Loading(shards))


def write(folder: Path, state: dict[str, Any], planner: DefaultSavePlanner | None = None) -> None:
    """What DCP writes, into `folder`. Raises OSError with the first rank's reason, a full disk say."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        dcp_save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True), planner=planner)
    except CheckpointException as error:  # not even an Exception: it would pass every handler above
        raise OSError(_first(error, "write")) from error


def fill(folder: Path, state: dict[str, Any], planner: DefaultLoadPlanner | None = None) -> None:
    """What DCP reads from `folder`, into the tensors of `state`. Raises OSError with the first rank's reason."""
    try:
        dcp_load(state, storage_reader=HuggingFaceStorageReader(str(folder)), planner=planner)
    except CheckpointException as error:
        raise OSError(f"{_first(error, 'read')} from {folder}") from error


def _first(error: CheckpointException, what: str) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank} could not {what}: {cause}"


def rng_name(rank: int) -> str:
    """What a rank's RNG state is saved as."""
    return f"rng.{rank}"


def saved_rng_name(folder: Path, rank: int) -> str:
    """The RNG state that `rank` takes: its own, or rank 0's if there was no such rank when it was saved.

    Raises FileNotFoundError if `folder` holds no state.
    """
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"{folder} holds no trainer state")
    names = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return rng_name(rank) if rng_name(rank) in names else rng_name(0)


class _Saving(DefaultSavePlanner):
    def __init__(self, shards: Mapping[str, TensorShard]) -> None:
        super().__init__()
        self._shards = shards

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[_placed(item, self._shards[item.index.fqn]) for item in plan.items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]


def _placed(item: WriteItem, shard: TensorShard) -> WriteItem:
    """The item of a tensor as the part of a larger one that it is."""
    assert item.tensor_data
    offsets, size = torch.Size(shard.start), torch.Size(shard.shape)
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=shard.tensor.size())
    data = replace(item.tensor_data, chunk=chunk, size=size)
    return replace(item, index=MetadataIndex(item.index.fqn, offsets), type=WriteItemType.SHARD, tensor_data=data)


class _Loading(DefaultLoadPlanner):
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
