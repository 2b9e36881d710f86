"""Regions: where parts of Hugging Face tensors are in an engine's parameters.

A region (`ParamSlice`) is one plain copy that the engine's own loader would make: a part of a tensor, and the part of a
parameter that it is copied to. With known regions, a refit copies directly into the live parameters, or into a second
copy of them (shadow), which one short copy makes live later.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlctl.refit.protocol import RefitError
from rlctl.refit.refit_plan import RefitPlan, TensorSlice
from rlctl.refit.weight_sink import BatchedCopy


@dataclass(frozen=True)
class ParamSlice:
    """Region: the part `box` of a Hugging Face tensor is at `view`, a part of a parameter. Both have the same shape."""

    box: TensorSlice
    view: Tensor


@dataclass(frozen=True)
class ItemPart:
    """Part of an item that an engine worker needs, and the memory in the worker's parameters for this part."""

    # Index of the part in the item.
    index: tuple[slice, ...]
    # Memory for the part, in the part's shape.
    view: Tensor
    # True if the part is the whole item.
    is_whole: bool


class ParamSliceSink:
    """Copies items into parameters of the engine worker. Ignores parts of items that the worker does not need.

    Under tensor parallelism a worker needs only its part of most tensors.
    """

    def __init__(self, plan: RefitPlan, regions: Iterable[ParamSlice], beside_requests: bool = False) -> None:
        """beside_requests: see `BatchedCopy`."""
        self._beside_requests = beside_requests
        by_name: dict[str, list[ParamSlice]] = {}
        for region in regions:
            by_name.setdefault(region.box.name, []).append(region)
        self._parts = [_find_parts(item.box, by_name.get(item.box.name, [])) for item in plan.items]
        self._dtypes = [getattr(torch, plan.entries[item.entry].dtype) for item in plan.items]

    def parts(self, number: int) -> tuple[ItemPart, ...]:
        """Return the parts of item `number` that the worker needs."""
        return self._parts[number]

    def target(self, number: int) -> Tensor | None:
        parts = self._parts[number]
        if len(parts) != 1 or not parts[0].is_whole:
            return None
        view = parts[0].view
        return view if view.is_contiguous() and view.dtype == self._dtypes[number] else None

    def copies(self, arrived: Iterable[tuple[int, Tensor]]) -> BatchedCopy:
        pairs = []
        for number, arrived_item in arrived:
            for part in self._parts[number]:
                pairs.append((part.view, arrived_item[part.index]))
        return BatchedCopy(pairs, self._beside_requests)

    def adopt(self, flat: Tensor) -> bool:
        return False


class ShadowParams:
    """A second copy of every parameter. `regions` are the live regions, moved to the second copy."""

    def __init__(self, parameters: Mapping[str, Tensor], regions: Iterable[ParamSlice]) -> None:
        # Cloned and not empty, because a commit also copies padding, which no refit writes.
        self._pairs = [(live.detach(), live.detach().clone()) for live in parameters.values()]
        by_storage = {live.untyped_storage().data_ptr(): (live, shadow) for live, shadow in self._pairs}
        self.regions = [ParamSlice(region.box, _shadow_view(region.view, by_storage)) for region in regions]
        self.nbytes = sum(shadow.numel() * shadow.element_size() for _, shadow in self._pairs)
        self._copies = BatchedCopy(self._pairs)

    def commit(self) -> None:
        """Queue copying the shadow parameters into the live parameters, on the current stream."""
        self._copies.run()


def verify_complete(regions: Iterable[ParamSlice], parameters: Mapping[str, Tensor], padded: set[str]) -> None:
    """Raise RefitError for a parameter that a refit would not fill completely.

    padded: names of parameters with more rows than their tensor, such as padded vocabularies.
    """
    written: dict[int, int] = {}
    for region in regions:
        storage = region.view.untyped_storage().data_ptr()
        written[storage] = written.get(storage, 0) + region.view.numel()
    for name, parameter in parameters.items():
        count = written.get(parameter.untyped_storage().data_ptr(), 0)
        if count != parameter.numel() and not (name in padded and count):
            raise RefitError(f"the engine's {name} has {parameter.numel()} numbers, the trainer's tensors fill {count}")


def _find_parts(item: TensorSlice, regions: list[ParamSlice]) -> tuple[ItemPart, ...]:
    parts = []
    item_ends = item.ends
    for region in regions:
        starts = [max(item_start, start) for item_start, start in zip(item.start, region.box.start)]
        ends = [min(item_end, end) for item_end, end in zip(item_ends, region.box.ends)]
        if any(end <= start for start, end in zip(starts, ends)):
            continue
        view: Any = region.view[_index_from(region.box.start, starts, ends)]
        parts.append(
            ItemPart(index=_index_from(item.start, starts, ends), view=view, is_whole=tuple(view.shape) == item.shape)
        )
    return tuple(parts)


def _index_from(origin: tuple[int, ...], starts: list[int], ends: list[int]) -> tuple[slice, ...]:
    """Return the index of the box [starts, ends) relative to a box that begins at `origin`."""
    return tuple(slice(start - first, end - first) for start, end, first in zip(starts, ends, origin))


def _shadow_view(view: Tensor, by_storage: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    live, shadow = by_storage[view.untyped_storage().data_ptr()]
    offset = view.storage_offset() - live.storage_offset()
    return shadow.as_strided(view.shape, view.stride(), shadow.storage_offset() + offset)
