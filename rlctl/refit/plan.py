"""The refit plan: items, owners, order and chunks of one transfer; made once, verified by every receiver.

Pure. A trainer rank holds boxes (rectangular parts) of Hugging Face tensors; a box, cut so that it fits a buffer,
is an item, the unit of checking; a chunk is sent by one rank at a time. The plan's `digest` travels with every refit.
Two sides that disagree about a name, a shape, a dtype, an owner or a boundary stop before a single byte is loaded.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest
from math import prod

from rlctl.preflight.memory import REFIT_GROUPS
from rlctl.refit.protocol import Header, RefitError

# (Hugging Face name, shape, dtype) of every whole tensor.
Layout = list[tuple[str, tuple[int, ...], str]]
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
ALIGNMENT = 512
# Items below this size are packed and travel together; larger ones travel each on its own, from and into place.
# Grouped NCCL broadcasts of Qwen3-8B's own tensors reached 100% of a raw broadcast's rate (two H200s); a separate
# broadcast costs a small tensor more than a copy through a buffer.
PACKED_BYTES = 16 << 20
# One check in this many items a refit where checks are sampled; the sample moves on with the version.
SAMPLE = 16


@dataclass(frozen=True)
class TensorEntry:
    """One whole tensor."""

    # Hugging Face's.
    name: str
    shape: tuple[int, ...]
    dtype: str
    # First byte in a flat buffer of all tensors.
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorSlice:
    """A rectangular part (box) of the tensor `name`: begin and extent in each dimension."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def slices(self) -> tuple[slice, ...]:
        """Return the box as an index of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape))


@dataclass(frozen=True)
class RefitItem:
    """A box that one rank sends."""

    # Index of its tensor in `RefitPlan.entries`.
    entry: int
    box: TensorSlice
    # First byte within the chunk.
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Segment:
    """Items [first, last) that travel in one piece: one large item, or several small ones packed."""

    first: int
    last: int
    offset: int
    nbytes: int

    @property
    def numbers(self) -> range:
        """Indices of its items."""
        return range(self.first, self.last)

    @property
    def single(self) -> bool:
        return self.last - self.first == 1


@dataclass(frozen=True)
class Chunk:
    """Segments that `owner` (a trainer rank) sends at a time; at most a buffer's size."""

    owner: int
    segments: tuple[Segment, ...]
    nbytes: int

    @property
    def numbers(self) -> range:
        """Indices of its items."""
        return range(self.segments[0].first, self.segments[-1].last)


@dataclass(frozen=True)
class RefitPlan:
    """All tensors of a refit, and the chunks that carry them in sending order: the owners take turns."""

    entries: tuple[TensorEntry, ...]
    items: tuple[RefitItem, ...]
    chunks: tuple[Chunk, ...]

    @classmethod
    def build(
        cls,
        layout: Iterable[tuple[str, tuple[int, ...], str]],
        boxes: Sequence[Sequence[TensorSlice]] | None = None,
        buffer_bytes: int = 1 << 62,
        edge_bytes: int = 1 << 62,
    ) -> "RefitPlan":
        """Return the plan of a layout: (name, shape, dtype) of every tensor.

        boxes[r]: parts that rank r holds (None: rank 0 holds all).

        A box that several ranks hold is sent by the one with the least to send. edge_bytes: size of a rank's first
        and last chunks, whose packing and loading nothing hides; towards the middle they grow to `buffer_bytes`.

        Raises RefitError when the boxes do not make up every tensor exactly, or when one row of a tensor does not fit
        `buffer_bytes`.
        """
        entries = _entries(layout)
        index = {entry.name: i for i, entry in enumerate(entries)}
        if boxes is None:
            boxes = [[TensorSlice(entry.name, (0,) * len(entry.shape), entry.shape) for entry in entries]]
        shares = _assign(entries, index, boxes)
        _check_coverage(entries, index, shares)
        return cls._in_turns(entries, [_split(share, entries, index, buffer_bytes, edge_bytes) for share in shares])

    @classmethod
    def _in_turns(cls, entries: tuple[TensorEntry, ...], parts: list[list[list[RefitItem]]]) -> "RefitPlan":
        """Return the plan in which owners take turns. parts[r]: rank r's chunks."""
        items: list[RefitItem] = []
        chunks: list[Chunk] = []
        for turn in range(max(map(len, parts), default=0)):
            for owner, chunk in ((owner, own[turn]) for owner, own in enumerate(parts) if turn < len(own)):
                segments, end = _segments(chunk, len(items))
                items += chunk
                chunks.append(Chunk(owner, segments, end))
        return cls(entries, tuple(items), tuple(chunks))

    @property
    def nbytes(self) -> int:
        """Size of a flat buffer that holds every tensor at its entry's offset."""
        return self.entries[-1].offset + aligned(self.entries[-1].nbytes)

    @cached_property
    def payload(self) -> int:
        """Bytes of the tensors themselves."""
        return sum(entry.nbytes for entry in self.entries)

    @cached_property
    def _sent_by(self) -> dict[int, frozenset[int]]:
        return {owner: frozenset(n for _, c in chunks for n in c.numbers) for owner, chunks in self._chunks_of.items()}

    @cached_property
    def _chunks_of(self) -> dict[int, list[tuple[int, Chunk]]]:
        found: dict[int, list[tuple[int, Chunk]]] = {owner: [] for owner in sorted({c.owner for c in self.chunks})}
        for number, chunk in enumerate(self.chunks):
            found[chunk.owner].append((number, chunk))
        return found

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Trainer ranks that send anything."""
        return tuple(self._chunks_of)

    @cached_property
    def owner_groups(self) -> tuple[tuple[int, ...], ...]:
        """The owners, dealt out in turn over at most `REFIT_GROUPS` groups.

        A group's owners share one communicator with all engine workers, so its number does not grow with ranks.
        """
        count = min(REFIT_GROUPS, len(self.owners))
        return tuple(self.owners[first::count] for first in range(count))

    @cached_property
    def digest(self) -> str:
        """Hash of names, shapes, dtypes, owners, order and boundaries."""
        rows = [[e.name, e.shape, e.dtype, e.offset] for e in self.entries]
        parts = [[i.entry, i.box.start, i.box.shape, i.offset] for i in self.items]
        chunks = [[c.owner, [[s.first, s.last, s.offset, s.nbytes] for s in c.segments]] for c in self.chunks]
        return hashlib.sha256(json.dumps([rows, parts, chunks]).encode()).hexdigest()[:16]

    def dtype(self, number: int) -> str:
        """Return the dtype in which item `number` travels."""
        return self.entries[self.items[number].entry].dtype

    def verify(self, header: Header) -> None:
        """Raise RefitError unless the header was made for this plan."""
        if self.digest != header.digest:
            raise RefitError(f"the trainer sends by plan {header.digest}, this end was given plan {self.digest}")

    def checked(self, header: Header) -> frozenset[int]:
        """Return the indices of the items whose checksums are compared in this refit."""
        if header.checks == "off":
            return frozenset()
        every = 1 if header.checks == "all" else SAMPLE
        return _every(every, -header.version % every, len(self.items))

    def checked_of(self, owner: int, header: Header) -> list[int]:
        """Return the checked items that `owner` sends, in sending order."""
        return sorted(self.checked(header) & self._sent_by[owner])

    def of(self, owner: int) -> list[tuple[int, Chunk]]:
        """Return the chunks that `owner` sends, with their indices."""
        return self._chunks_of.get(owner, [])

    def taken_by(self, receiver: int) -> list[tuple[int, Chunk]]:
        """Return all chunks, with their indices, in the order in which engine worker `receiver` (from 1) reads them.

        It takes one of each owner in turn. Neighbours begin with different owners, so as not to share one's link.
        """
        by_owner = [self.of(owner) for owner in self.owners]
        first = (receiver - 1) % len(by_owner)
        turns = zip_longest(*by_owner[first:], *by_owner[:first])
        return [part for turn in turns for part in turn if part is not None]

    def names(self, chunk: Chunk) -> str:
        """Return the names of the first and last tensor of a chunk, for messages."""
        first = self.items[chunk.segments[0].first].box.name
        last = self.items[chunk.segments[-1].last - 1].box.name
        return first if first == last else f"{first} to {last}"


@lru_cache(maxsize=2 * SAMPLE)
def _every(step: int, first: int, count: int) -> frozenset[int]:
    # Counted once: a mixture of experts has tens of thousands of items.
    return frozenset(range(first, count, step))


def aligned(size: int) -> int:
    """Return the size rounded up to the alignment of every place."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def layout_digest(layout: Layout) -> str:
    """Return a hash by which ranks compare their layouts."""
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()[:16]


def _entries(layout: Iterable[tuple[str, tuple[int, ...], str]]) -> tuple[TensorEntry, ...]:
    entries, offset = [], 0
    for name, shape, dtype in layout:
        entry = TensorEntry(name, tuple(shape), dtype, offset)
        entries.append(entry)
        offset += aligned(entry.nbytes)
    return tuple(entries)


def _assign(
    entries: tuple[TensorEntry, ...], index: dict[str, int], boxes: Sequence[Sequence[TensorSlice]]
) -> list[list[TensorSlice]]:
    """Return each rank's boxes to send, in the entries' order; a box held by several ranks goes to the least loaded."""
    holders: dict[TensorSlice, list[int]] = {}
    for rank, share in enumerate(boxes):
        for box in share:
            if box.name not in index:
                raise RefitError(f"trainer rank {rank} holds {box.name}, which its layout does not list")
            if prod(box.shape):
                holders.setdefault(box, []).append(rank)
    loads, shares = [0] * len(boxes), [list[TensorSlice]() for _ in boxes]
    for box in sorted(holders, key=lambda box: (index[box.name], box.start)):
        rank = min(holders[box], key=lambda rank: loads[rank])
        loads[rank] += _nbytes(box, entries[index[box.name]])
        shares[rank].append(box)
    return shares


def _check_coverage(entries: tuple[TensorEntry, ...], index: dict[str, int], shares: list[list[TensorSlice]]) -> None:
    held = [0] * len(entries)
    for box in (box for share in shares for box in share):
        entry = entries[index[box.name]]
        if any(start + size > whole for start, size, whole in zip(box.start, box.shape, entry.shape)):
            raise RefitError(f"{box.name}: a trainer rank holds {box.shape} from {box.start}, outside {entry.shape}")
        held[index[box.name]] += prod(box.shape)
    for entry, count in zip(entries, held):
        if count != prod(entry.shape):
            raise RefitError(f"{entry.name}: the trainer ranks hold {count} of its {prod(entry.shape)} numbers")


def _split(
    share: list[TensorSlice], entries: tuple[TensorEntry, ...], index: dict[str, int], limit: int, edge: int
) -> list[list[RefitItem]]:
    """Return a rank's boxes as chunks of items, each filled in order."""
    chunks: list[list[RefitItem]] = []
    sent, left = 0, sum(_nbytes(box, entries[index[box.name]]) for box in share)
    room = end = 0
    for box in share:
        number = index[box.name]
        rest: TensorSlice | None = box
        while rest is not None:
            if not chunks or end + _nbytes(rest, entries[number]) > room:
                chunks.append([])
                room, end = min(limit, max(edge, min(sent, left // 2))), 0
            part, rest = _cut(rest, entries[number], room, limit)
            size = _nbytes(part, entries[number])
            chunks[-1].append(RefitItem(number, part, end, size))
            end += aligned(size)
            sent, left = sent + size, left - size
    return chunks


def _cut(box: TensorSlice, entry: TensorEntry, room: int, limit: int) -> tuple[TensorSlice, TensorSlice | None]:
    """Return as many of the box's first rows as have room, at least one, and the rest."""
    if _nbytes(box, entry) <= room:
        return box, None
    row = _nbytes(box, entry) // box.shape[0]
    if row > limit:
        raise RefitError(f"{box.name}: one row has {row} bytes, a buffer {limit}: raise refit.buffer_memory_ratio")
    rows = max(1, room // row)
    if rows == box.shape[0]:
        return box, None
    above = TensorSlice(box.name, box.start, (rows, *box.shape[1:]))
    return above, TensorSlice(box.name, (box.start[0] + rows, *box.start[1:]), (box.shape[0] - rows, *box.shape[1:]))


def _segments(items: list[RefitItem], first: int) -> tuple[tuple[Segment, ...], int]:
    """Return the segments of a chunk whose first item has index `first`, and the chunk's size."""
    segments: list[Segment] = []
    packing = False
    for number, item in enumerate(items, first):
        small = item.nbytes < PACKED_BYTES
        if small and packing:
            last = segments[-1]
            size = item.offset + item.nbytes - last.offset
            segments[-1] = Segment(last.first, number + 1, last.offset, size)
        else:
            segments.append(Segment(number, number + 1, item.offset, item.nbytes))
        packing = small
    return tuple(segments), aligned(items[-1].offset + items[-1].nbytes)


def _nbytes(box: TensorSlice, entry: TensorEntry) -> int:
    return prod(box.shape) * ITEM_BYTES[entry.dtype]
