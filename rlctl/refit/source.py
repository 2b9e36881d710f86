"""What a trainer rank sends from: its own shards, under Hugging Face names, wherever the backend keeps them."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlctl.refit.plan import RefitItem, RefitPlan, TensorSlice
from rlctl.refit.protocol import RefitError


@dataclass(frozen=True)
class Shard:
    """A part of one tensor: `tensor` is this rank's own memory (any dtype and strides), `start` where it begins."""

    name: str
    start: tuple[int, ...]
    tensor: Tensor

    @property
    def box(self) -> TensorSlice:
        return TensorSlice(self.name, self.start, tuple(self.tensor.shape))


class Sharded(Protocol):
    """The part of a trainer rank that a refit reads."""

    def layout(self, dtype: str | None = None) -> list[tuple[str, tuple[int, ...], str]]:
        """(Hugging Face name, shape, dtype) of every whole tensor."""

    def shards(self) -> list[Shard]:
        """What this rank holds: views, no copy, no collective."""


class WeightSource:
    """A rank's items as views of its shards, found once."""

    def __init__(self, plan: RefitPlan, rank: int, shards: list[Shard]) -> None:
        self.plan, self.rank = plan, rank
        self._addresses = _addresses(shards)
        by_name: dict[str, list[Shard]] = {}
        for shard in shards:
            by_name.setdefault(shard.name, []).append(shard)
        self._views: dict[int, Tensor] = {}
        for _, chunk in plan.of(rank):
            for segment in chunk.segments:
                for number in range(segment.first, segment.last):
                    item = plan.items[number]
                    self._views[number] = _view(item, by_name.get(item.box.name, []))

    def view(self, number: int) -> Tensor:
        """Item `number` in the trainer's own dtype and memory."""
        return self._views[number]

    def dtype(self, number: int) -> torch.dtype:
        """What item `number` travels as."""
        dtype: torch.dtype = getattr(torch, self.plan.entries[self.plan.items[number].entry].dtype)
        return dtype

    def ready(self, number: int) -> bool:
        """Whether item `number` can be sent from where it lies: right dtype, contiguous."""
        view = self.view(number)
        return view.dtype == self.dtype(number) and view.is_contiguous()

    def ready_singles(self) -> set[int]:
        """Return the items that travel each on its own and can be sent from where they lie."""
        singles = (s.first for _, chunk in self.plan.of(self.rank) for s in chunk.segments if s.single)
        return {number for number in singles if self.ready(number)}

    def verify_in_place(self, shards: list[Shard]) -> None:
        """Raise RefitError if the trainer's weights do not lie where they lay: views of old memory hold old weights."""
        now = _addresses(shards)
        for name, address in self._addresses.items():
            if now.get(name) != address:
                raise RefitError(f"{name[0]} moved to other memory after the refit was opened")


def _addresses(shards: list[Shard]) -> dict[tuple[str, tuple[int, ...]], int]:
    return {(shard.name, shard.start): shard.tensor.data_ptr() for shard in shards}


def _view(item: RefitItem, shards: list[Shard]) -> Tensor:
    for shard in shards:
        begin = [want - have for want, have in zip(item.box.start, shard.start)]
        inside = all(b >= 0 and b + size <= n for b, size, n in zip(begin, item.box.shape, shard.tensor.shape))
        if inside:
            view: Tensor = shard.tensor[tuple(slice(b, b + size) for b, size in zip(begin, item.box.shape))]
            return view
    raise RefitError(f"{item.box.name}: this rank does not hold {item.box.shape} from {item.box.start}")
