"""A ring of reused buffers, for items that cannot be sent or received in place."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from rlctl.refit.refit_plan import Chunk, RefitPlan, Segment, align_size
from rlctl.refit.weight_sink import view_typed


class StagingBuffers:
    """Ring of buffers of one end, and each item's offset in a buffer. A buffer has room for the largest chunk.

    The items of a segment are adjacent, so that a packed segment is contiguous.
    """

    def __init__(
        self, plan: RefitPlan, chunks: Iterable[Chunk], count: int, device: torch.device, in_place: Collection[int]
    ) -> None:
        """in_place: numbers of items that need no buffer."""
        self._plan = plan
        # Number of an item that uses a buffer -> its first byte there.
        self.offsets: dict[int, int] = {}
        fullest = 0
        for chunk in chunks:
            end = 0
            for segment in chunk.segments:
                if any(number not in in_place for number in segment.numbers):
                    for number in segment.numbers:
                        self.offsets[number] = end + plan.items[number].offset - segment.offset
                    end += align_size(segment.nbytes)
            fullest = max(fullest, end)
        self.buffers = [torch.empty(fullest, dtype=torch.uint8, device=device) for _ in range(count if fullest else 0)]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for buffer in self.buffers)

    def has_items_of(self, chunk: Chunk) -> bool:
        """Return True if any item of the chunk uses a buffer."""
        return any(number in self.offsets for number in chunk.numbers)

    def segment_bytes(self, segment: Segment, slot: int) -> Tensor:
        """Return the segment's bytes, uint8 [segment.nbytes], in buffer `slot`."""
        offset = self.offsets[segment.first]
        return self.buffers[slot][offset : offset + segment.nbytes]

    def view(self, number: int, slot: int) -> Tensor | None:
        """Return item `number` in buffer `slot`, with its dtype and shape; None if the item uses no buffer."""
        if number not in self.offsets:
            return None
        shape = self._plan.items[number].box.shape
        return view_typed(self.buffers[slot], self.offsets[number], self._plan.dtype(number), shape)
