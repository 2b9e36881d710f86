"""Source of a trainer rank's items: views of the rank's own shards, under Hugging Face names."""

from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from rlctl.refit.protocol import RefitError
from rlctl.refit.refit_plan import RefitPlan, TensorSlice


@dataclass(frozen=True)
class Shard:
    """A part of one tensor, in this rank's memory."""

    # Hugging Face name of the tensor.
    name: str
    # First index of the part in the whole tensor, in each dimension.
    start: tuple[int, ...]
    # The part's values; any dtype and strides.
    tensor: Tensor

    @property
    def box(self) -> TensorSlice:
        return TensorSlice(self.name, self.start, tuple(self.tensor.shape))


class Sharded(Protocol):
    """Methods by which a refit reads the weights of a trainer rank."""

    def layout(self, dtype: str | None = None) -> list[tuple[str, tuple[int, ...], str]]:
        """Return (Hugging Face name, shape, dtype) of every whole tensor."""

    def shards(self) -> list[Shard]:
        """Return the parts of tensors that this rank has, as views of its memory. This makes no collective call."""


class WeightSource:
    """The items that a rank sends, as views of its shards."""

    def __init__(self, plan: RefitPlan, rank: int, shards: list[Shard]) -> None:
        self.plan = plan
        self.rank = rank
        self._addresses = _addresses(shards)
        by_name: dict[str, list[Shard]] = {}
        for shard in shards:
            by_name.setdefault(shard.name, []).append(shard)
        self.chunks = [chunk for _, chunk in plan.chunks_of(rank)]
        self._views: dict[int, Tensor] = {}
        for chunk in self.chunks:
            for number in chunk.numbers:
                box = plan.items[number].box
                self._views[number] = _view_box(box, by_name.get(box.name, []))

    def view(self, number: int) -> Tensor:
        """Return item `number` in the trainer's own dtype and memory."""
        return self._views[number]

    def is_ready(self, number: int) -> bool:
        """Return True if item `number` can be sent without a copy: it has the right dtype and is contiguous."""
        view = self.view(number)
        return view.dtype == getattr(torch, self.plan.dtype(number)) and view.is_contiguous()

    def ready_singles(self) -> set[int]:
        """Return the numbers of items that are whole segments and can be sent without a copy."""
        segments = chain.from_iterable(chunk.segments for chunk in self.chunks)
        return {segment.first for segment in segments if segment.is_single and self.is_ready(segment.first)}

    def verify_in_place(self, shards: list[Shard]) -> None:
        """Raise RefitError if the trainer's weights have moved to other memory, which makes the views here invalid."""
        addresses = _addresses(shards)
        for (name, start), address in self._addresses.items():
            if addresses.get((name, start)) != address:
                raise RefitError(f"{name} moved to other memory after the refit was opened")


def _addresses(shards: list[Shard]) -> dict[tuple[str, tuple[int, ...]], int]:
    return {(shard.name, shard.start): shard.tensor.data_ptr() for shard in shards}


def _view_box(box: TensorSlice, shards: list[Shard]) -> Tensor:
    for shard in shards:
        starts = [box_start - shard_start for box_start, shard_start in zip(box.start, shard.start)]
        sizes = shard.tensor.shape
        if all(start >= 0 and start + extent <= size for start, extent, size in zip(starts, box.shape, sizes)):
            view: Tensor = shard.tensor[tuple(slice(start, start + extent) for start, extent in zip(starts, box.shape))]
            return view
    raise RefitError(f"{box.name}: this rank does not hold {box.shape} from {box.start}")
