"""The sender's ring: a few reused buffers through which items pass that cannot be sent from where they lie.

Allocated once, at the size that the fullest chunk needs; a chunk's items lie back to back, so that packed segments
stay one run of bytes.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from rlctl.refit.batched_copy import BatchedCopy
from rlctl.refit.plan import Chunk, RefitPlan, Segment, aligned
from rlctl.refit.sink import typed
from rlctl.refit.source import WeightSource


class StagingBuffers:
    """Places of a chunk's segments within one buffer, and the buffers; for either end.

    in_place: items that need no place here.
    """

    def __init__(
        self, plan: RefitPlan, chunks: Collection[Chunk], count: int, device: torch.device, in_place: Collection[int]
    ) -> None:
        self._plan = plan
        self._offsets: dict[Segment, int] = {}
        most = 0
        for chunk in chunks:
            end = 0
            for segment in chunk.segments:
                if any(number not in in_place for number in range(segment.first, segment.last)):
                    self._offsets[segment] = end
                    end += aligned(segment.nbytes)
            most = max(most, end)
        size = count if most else 0
        self.buffers = [torch.empty(most, dtype=torch.uint8, device=device) for _ in range(size)]

    @property
    def nbytes(self) -> int:
        """Memory of all buffers."""
        return sum(buffer.numel() for buffer in self.buffers)

    def used(self, chunk: Chunk) -> bool:
        """Whether any of the chunk passes through a buffer."""
        return any(segment in self._offsets for segment in chunk.segments)

    def has(self, segment: Segment) -> bool:
        """Whether the segment passes through a buffer."""
        return segment in self._offsets

    def run(self, segment: Segment, slot: int) -> Tensor:
        """The segment's bytes, uint8 [segment.nbytes], in buffer `slot`."""
        offset = self._offsets[segment]
        return self.buffers[slot][offset : offset + segment.nbytes]

    def view(self, segment: Segment, number: int, slot: int) -> Tensor:
        """Item `number` of the segment in buffer `slot`, with its dtype and shape."""
        item = self._plan.items[number]
        dtype = self._plan.entries[item.entry].dtype
        return typed(self.buffers[slot], self.offset(segment, number), dtype, item.box.shape)

    def offset(self, segment: Segment, number: int) -> int:
        """Where item `number` begins in its buffer, in bytes."""
        return self._offsets[segment] + self._plan.items[number].offset - segment.offset


class ChunkWriter:
    """Copies into a ring's buffers, converted to the dtype that travels; prepared once for each chunk and buffer."""

    def __init__(self, slots: StagingBuffers, source: WeightSource) -> None:
        self._slots, self._source = slots, source
        self._copies: dict[tuple[int, int], BatchedCopy] = {}

    def run(self, number: int, chunk: Chunk, slot: int) -> None:
        """Copy what of the sender's chunk `number` needs a place into buffer `slot`; on the current stream."""
        if (number, slot) not in self._copies:
            self._copies[number, slot] = BatchedCopy(
                (self._slots.view(segment, number, slot), self._source.view(number))
                for segment in chunk.segments
                if self._slots.has(segment)
                for number in range(segment.first, segment.last)
            )
        self._copies[number, slot].run()

    def sent(self, segment: Segment, number: int, slot: int) -> Tensor:
        """Item `number` as it travels: in buffer `slot`, or where it lies."""
        return self._slots.view(segment, number, slot) if self._slots.has(segment) else self._source.view(number)
