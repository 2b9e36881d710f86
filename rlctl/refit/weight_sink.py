"""Destinations of a refit in an engine worker: the interface `WeightSink`, and `WholeTensorSink` for vLLM's loader."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from rlctl.refit.refit_plan import ITEM_BYTES, RefitPlan, TensorEntry

# For a copy of at least this many bytes the launch of a separate kernel costs no time.
LARGE = 32 << 20


class BatchedCopy:
    """Copies of (target, source) pairs in few kernels. Shapes of a pair are equal; dtypes may differ."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]], beside_requests: bool = False) -> None:
        """beside_requests: True if requests run on the device at the same time."""
        self._large: list[tuple[Tensor, Tensor]] = []
        groups: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in pairs:
            is_dense = target.is_contiguous() and source.is_contiguous()
            is_plain = is_dense and target.dtype == source.dtype
            if is_plain and not beside_requests and target.numel() * target.element_size() >= LARGE:
                self._large.append((target, source))
                continue
            # `_foreach_copy_` uses one kernel only if all pairs of a group have equal dtypes and are dense.
            targets, sources = groups.setdefault((target.dtype, source.dtype, is_dense), ([], []))
            targets.append(target)
            sources.append(source)
        self._groups = list(groups.values())

    @torch.no_grad()
    def run(self) -> None:
        """Queue all copies on the current stream."""
        for target, source in self._large:
            target.copy_(source, non_blocking=target.is_cuda)
        for targets, sources in self._groups:
            torch._foreach_copy_(targets, sources, non_blocking=targets[0].is_cuda)


class WeightSink(Protocol):
    """Memory in an engine worker that receives a version of the weights."""

    def target(self, number: int) -> Tensor | None:
        """Return contiguous memory into which item `number` may be received directly; None if there is none."""

    def copies(self, arrived: Iterable[tuple[int, Tensor]]) -> BatchedCopy:
        """Return the copies that bring arrived items into this memory.

        arrived: (number, item in the shape of its box, with any strides and any float dtype).
        """

    def adopt(self, flat: Tensor) -> bool:
        """Use a whole version in shared memory without copying. Return False if this sink needs its items one by one.

        flat: uint8 [plan.nbytes], every entry at its offset. It stays unchanged until the next refit.
        """


class WholeTensorSink:
    """Receives whole tensors under their Hugging Face names, for an engine that rearranges weights itself."""

    def __init__(self, plan: RefitPlan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._flat: Tensor | None = None
        self._has_adopted = False

    def target(self, number: int) -> Tensor | None:
        view = self._item_buffer(number)
        return view if view.is_contiguous() else None

    def copies(self, arrived: Iterable[tuple[int, Tensor]]) -> BatchedCopy:
        return BatchedCopy((self._item_buffer(number), arrived_item) for number, arrived_item in arrived)

    def adopt(self, flat: Tensor) -> bool:
        self._flat = flat
        self._has_adopted = True
        return True

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return (name, tensor) of every tensor of the plan, in the plan's order."""
        return ((entry.name, view_entry(self._buffer, entry)) for entry in self._plan.entries)

    @property
    def extra_bytes(self) -> int:
        """Bytes of memory allocated by this sink."""
        return 0 if self._flat is None or self._has_adopted else self._flat.numel()

    @property
    def _buffer(self) -> Tensor:
        if self._flat is None:
            self._flat = torch.empty(self._plan.nbytes, dtype=torch.uint8, device=self._device)
        return self._flat

    def _item_buffer(self, number: int) -> Tensor:
        item = self._plan.items[number]
        view: Tensor = view_entry(self._buffer, self._plan.entries[item.entry])[item.box.slices()]
        return view


def view_entry(flat: Tensor, entry: TensorEntry) -> Tensor:
    """Return the entry's slice of a flat uint8 buffer, with its dtype and shape."""
    return view_typed(flat, entry.offset, entry.dtype, entry.shape)


def view_typed(flat: Tensor, offset: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return part of a uint8 buffer from byte `offset` on, viewed with a dtype and shape."""
    size = ITEM_BYTES[dtype] * torch.Size(shape).numel()
    return flat[offset : offset + size].view(getattr(torch, dtype)).view(shape)
