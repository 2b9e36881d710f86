"""The refit plan: items, owners, order and chunks of every refit. It is made once; each receiver verifies it.

A trainer rank has boxes (rectangular parts) of Hugging Face tensors. A box, or a part of a box that fits a buffer, is
an item: the unit of checksums. A chunk is a list of items that one rank, its owner, sends together. Each refit
announces the plan's `digest`: if trainer and engine disagree about a name, a shape, a dtype, an owner or a boundary,
the refit stops before a single byte is loaded. This module uses no devices and no processes.
"""

import hashlib
import json
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise, starmap, zip_longest
from math import prod
from typing import Any, NamedTuple, Protocol

from rlctl.preflight.memory import REFIT_GROUPS
from rlctl.refit.protocol import EngineReport, Header, LoadMode, Mode, RefitError, TransportSpec

# (Hugging Face name, shape, dtype) of every whole tensor.
Layout = list[tuple[str, tuple[int, ...], str]]
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
ALIGNMENT = 512
# Items below this size are packed and sent together. A larger item is sent alone, directly from the trainer's memory
# and into the engine's.
# Grouped NCCL broadcasts of Qwen3-8B's own tensors reached 100% of a raw broadcast's rate (two H200s); a separate
# broadcast costs a small tensor more than a copy through a buffer.
PACKED_BYTES = 16 << 20
# With `refit.checksum=sampled`, a refit checks one of this many items. Each version checks other items.
SAMPLE = 16


@dataclass(frozen=True)
class TensorEntry:
    """One whole tensor."""

    # Name in Hugging Face's folder.
    name: str
    shape: tuple[int, ...]
    dtype: str
    # First byte of the tensor in a flat buffer of all tensors.
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


# The small parts of a plan are named tuples: there are hundreds of thousands, and a frozen dataclass takes four times
# as long to make.
class TensorSlice(NamedTuple):
    """A box (rectangular part) of the tensor `name`: first index and size in each dimension."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """End of the box in each dimension."""
        return tuple(start + size for start, size in zip(self.start, self.shape))

    def slices(self) -> tuple[slice, ...]:
        """Return the box as an index of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape))


# (index of a tensor in the plan's entries, one of its boxes, bytes of this box).
_SizedBox = tuple[int, TensorSlice, int]


class RefitItem(NamedTuple):
    """A box, or a part of a box, that one rank sends."""

    # Index of its tensor in `RefitPlan.entries`.
    entry: int
    box: TensorSlice
    # First byte of the item within its chunk.
    offset: int
    nbytes: int


class Segment(NamedTuple):
    """Items [first, last) that are sent as one piece of memory: one large item, or several small packed ones."""

    first: int
    last: int
    # First byte of the segment within its chunk, and its size in bytes.
    offset: int
    nbytes: int

    @property
    def numbers(self) -> range:
        """Indices of its items."""
        return range(self.first, self.last)

    @property
    def is_single(self) -> bool:
        """True if the segment is one item."""
        return self.last - self.first == 1


class Chunk(NamedTuple):
    """Segments that `owner` (a trainer rank) sends together. They fit one buffer."""

    owner: int
    segments: tuple[Segment, ...]
    nbytes: int

    @property
    def numbers(self) -> range:
        """Indices of its items."""
        return range(self.segments[0].first, self.segments[-1].last)


@dataclass(frozen=True)
class RefitPlan:
    """All tensors of a refit, and the chunks in sending order. The owners take turns, one chunk each time."""

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

        boxes[r]: boxes that rank r has. None: rank 0 has all tensors. If several ranks have a box, the rank with the
        fewest bytes to send is its owner. edge_bytes: size of a rank's first and last chunks. It is small, because no
        other transfer runs while the first is packed and the last is loaded. Chunks in between grow up to
        `buffer_bytes`.

        Raises RefitError if the boxes do not cover every tensor exactly, or if one row of a tensor does not fit
        `buffer_bytes`.
        """
        entries = _make_entries(layout)
        if boxes is None:
            boxes = [[TensorSlice(entry.name, (0,) * len(entry.shape), entry.shape) for entry in entries]]
        shares = _assign_boxes(entries, boxes)
        return cls._from_chunks(entries, [_split_share(share, buffer_bytes, edge_bytes) for share in shares])

    @classmethod
    def _from_chunks(
        cls, entries: tuple[TensorEntry, ...], chunks_of_ranks: list[list[list[RefitItem]]]
    ) -> "RefitPlan":
        """Return the plan in which owners take turns. chunks_of_ranks[r]: rank r's chunks."""
        items: list[RefitItem] = []
        chunks: list[Chunk] = []
        for turn in range(max(map(len, chunks_of_ranks), default=0)):
            for owner, owner_chunks in enumerate(chunks_of_ranks):
                if turn < len(owner_chunks):
                    segments, nbytes = _make_segments(owner_chunks[turn], len(items))
                    items += owner_chunks[turn]
                    chunks.append(Chunk(owner, segments, nbytes))
        return cls(entries, tuple(items), tuple(chunks))

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled as plain values, because Ray's pickler calls a Python function for every object of a class.
        entries = [(entry.name, entry.shape, entry.dtype) for entry in self.entries]
        items = [(entry, start, shape, offset, nbytes) for entry, (_, start, shape), offset, nbytes in self.items]
        chunks = [(owner, [tuple(segment) for segment in segments], nbytes) for owner, segments, nbytes in self.chunks]
        return _unpickle_plan, (pickle.dumps((entries, items, chunks), pickle.HIGHEST_PROTOCOL),)

    @property
    def nbytes(self) -> int:
        """Size in bytes of a flat buffer with every tensor at its entry's offset."""
        return self.entries[-1].offset + align_size(self.entries[-1].nbytes)

    @cached_property
    def payload(self) -> int:
        """Number of bytes of all tensors, without padding."""
        return sum(entry.nbytes for entry in self.entries)

    @cached_property
    def _items_by_owner(self) -> dict[int, frozenset[int]]:
        items_by_owner = {}
        for owner, numbered_chunks in self._chunks_by_owner.items():
            items_by_owner[owner] = frozenset(chain.from_iterable(chunk.numbers for _, chunk in numbered_chunks))
        return items_by_owner

    @cached_property
    def _chunks_by_owner(self) -> dict[int, list[tuple[int, Chunk]]]:
        owners = sorted({chunk.owner for chunk in self.chunks})
        chunks_by_owner: dict[int, list[tuple[int, Chunk]]] = {owner: [] for owner in owners}
        for number, chunk in enumerate(self.chunks):
            chunks_by_owner[chunk.owner].append((number, chunk))
        return chunks_by_owner

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Trainer ranks that own at least one chunk."""
        return tuple(self._chunks_by_owner)

    @cached_property
    def owner_groups(self) -> tuple[tuple[int, ...], ...]:
        """The owners, distributed round-robin over at most `REFIT_GROUPS` groups.

        A group's owners share one communicator with all engine workers. So the number of communicators does not grow
        with the number of ranks.
        """
        count = min(REFIT_GROUPS, len(self.owners))
        return tuple(self.owners[first::count] for first in range(count))

    @cached_property
    def digest(self) -> str:
        """Hash of the plan's names, shapes, dtypes, owners, order and boundaries."""
        entries = [[entry.name, entry.shape, entry.dtype, entry.offset] for entry in self.entries]
        items = [[item.entry, item.box.start, item.box.shape, item.offset] for item in self.items]
        # Tuples need no conversion: JSON writes them as lists.
        chunks = [[chunk.owner, chunk.segments] for chunk in self.chunks]
        return _short_hash([entries, items, chunks])

    def dtype(self, number: int) -> str:
        """Return the dtype in which item `number` is sent."""
        return self.entries[self.items[number].entry].dtype

    def verify(self, header: Header) -> None:
        """Raise RefitError unless the header announces this plan."""
        if self.digest != header.digest:
            raise RefitError(f"the trainer sends by plan {header.digest}, this end was given plan {self.digest}")

    def checked_items(self, header: Header) -> frozenset[int]:
        """Return the indices of the items whose checksums are compared in this refit."""
        if header.checks == "off":
            return frozenset()
        step = 1 if header.checks == "all" else SAMPLE
        return _every_nth(step, -header.version % step, len(self.items))

    def checked_items_of(self, owner: int, header: Header) -> list[int]:
        """Return the checked items that `owner` sends, in sending order."""
        return sorted(self.checked_items(header) & self._items_by_owner[owner])

    def chunks_of(self, owner: int) -> list[tuple[int, Chunk]]:
        """Return (index, chunk) of the chunks that `owner` sends."""
        return self._chunks_by_owner.get(owner, [])

    def chunks_for(self, receiver: int) -> list[tuple[int, Chunk]]:
        """Return (index, chunk) of all chunks, in the order in which engine worker `receiver` (from 1) reads them.

        The worker reads one chunk of each owner in turn. Consecutive workers begin with different owners, because two
        workers that read from the same owner share its link.
        """
        chunks_by_owner = [self.chunks_of(owner) for owner in self.owners]
        first = (receiver - 1) % len(chunks_by_owner)
        turns = zip_longest(*chunks_by_owner[first:], *chunks_by_owner[:first])
        return [numbered_chunk for numbered_chunk in chain.from_iterable(turns) if numbered_chunk is not None]

    def names(self, chunk: Chunk) -> str:
        """Return the names of the first and last tensor of a chunk, for messages."""
        first = self.items[chunk.segments[0].first].box.name
        last = self.items[chunk.segments[-1].last - 1].box.name
        return first if first == last else f"{first} to {last}"


@lru_cache(maxsize=2 * SAMPLE)
def _every_nth(step: int, first: int, count: int) -> frozenset[int]:
    # Cached, because a mixture of experts has tens of thousands of items.
    return frozenset(range(first, count, step))


def align_size(size: int) -> int:
    """Return the size rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def layout_digest(layout: Layout) -> str:
    """Return a hash of a layout, with which ranks compare their layouts."""
    return _short_hash(layout)


def boxes_digest(boxes: list[TensorSlice]) -> str:
    """Return a hash of boxes, by which ranks with copies of the same weights compare their boxes."""
    return _short_hash(boxes)


def _short_hash(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]


def _make_entries(layout: Iterable[tuple[str, tuple[int, ...], str]]) -> tuple[TensorEntry, ...]:
    entries = []
    offset = 0
    for name, shape, dtype in layout:
        entry = TensorEntry(name, tuple(shape), dtype, offset)
        entries.append(entry)
        offset += align_size(entry.nbytes)
    return tuple(entries)


def _unpickle_plan(fields: bytes) -> RefitPlan:
    layout, items, chunks = pickle.loads(fields)
    entries = _make_entries(layout)
    plan_items = []
    for entry, start, shape, offset, nbytes in items:
        plan_items.append(RefitItem(entry, TensorSlice(entries[entry].name, start, shape), offset, nbytes))
    plan_chunks = []
    for owner, segments, nbytes in chunks:
        plan_chunks.append(Chunk(owner, tuple(starmap(Segment, segments)), nbytes))
    return RefitPlan(entries, tuple(plan_items), tuple(plan_chunks))


def _assign_boxes(entries: tuple[TensorEntry, ...], boxes: Sequence[Sequence[TensorSlice]]) -> list[list[_SizedBox]]:
    """Return for each rank the boxes that it sends, in the entries' order.

    If several ranks have a box, the rank with the fewest bytes so far sends it. Raises RefitError unless the boxes
    cover every tensor exactly.
    """
    entry_numbers = {entry.name: number for number, entry in enumerate(entries)}
    holders: list[dict[TensorSlice, list[int]]] = [{} for _ in entries]
    for rank, rank_boxes in enumerate(boxes):
        for box in rank_boxes:
            if box.name not in entry_numbers:
                raise RefitError(f"trainer rank {rank} holds {box.name}, which its layout does not list")
            holders[entry_numbers[box.name]].setdefault(box, []).append(rank)
    loads = [0] * len(boxes)
    shares: list[list[_SizedBox]] = [[] for _ in boxes]
    for number, entry in enumerate(entries):
        covered = 0
        for box in sorted(holders[number]):
            count = prod(box.shape)
            if not count:
                continue
            if any(end > size for end, size in zip(box.ends, entry.shape)):
                raise RefitError(
                    f"{box.name}: a trainer rank holds {box.shape} from {box.start}, outside {entry.shape}"
                )
            covered += count
            nbytes = count * ITEM_BYTES[entry.dtype]
            rank = min(holders[number][box], key=loads.__getitem__)
            loads[rank] += nbytes
            shares[rank].append((number, box, nbytes))
        if covered != prod(entry.shape):
            raise RefitError(f"{entry.name}: the trainer ranks hold {covered} of its {prod(entry.shape)} numbers")
    return shares


def _split_share(share: list[_SizedBox], limit: int, edge: int) -> list[list[RefitItem]]:
    """Return a rank's boxes as chunks of items, filled one after the other.

    The first and last chunks have room for `edge` bytes, chunks in between for up to `limit` bytes.
    """
    chunks: list[list[RefitItem]] = []
    # Bytes in the chunks so far, and bytes that are left.
    sent = 0
    unsent = sum(nbytes for _, _, nbytes in share)
    # Size of the last chunk, and the first free byte in it.
    room = 0
    end = 0
    for number, whole_box, box_bytes in share:
        # Rows of the box that are in no chunk yet, and their bytes.
        rest: TensorSlice | None = whole_box
        rest_bytes = box_bytes
        while rest is not None:
            if not chunks or end + rest_bytes > room:
                chunks.append([])
                # Chunks grow with the bytes sent before, and shrink with the bytes left.
                room = min(limit, max(edge, min(sent, unsent // 2)))
                end = 0
            if rest_bytes > room:
                part, below = _cut_box(rest, rest_bytes, room, limit)
                part_bytes = rest_bytes // rest.shape[0] * part.shape[0]
            else:
                part = rest
                below = None
                part_bytes = rest_bytes
            chunks[-1].append(RefitItem(number, part, end, part_bytes))
            end += align_size(part_bytes)
            rest_bytes -= part_bytes
            sent += part_bytes
            unsent -= part_bytes
            rest = below
    return chunks


def _cut_box(box: TensorSlice, nbytes: int, room: int, limit: int) -> tuple[TensorSlice, TensorSlice | None]:
    """Split a box by rows: return the first rows that fit `room`, at least one row, and the remaining rows or None."""
    name, start, shape = box
    row_bytes = nbytes // shape[0]
    if row_bytes > limit:
        raise RefitError(f"{name}: one row has {row_bytes} bytes, a buffer {limit}: raise refit.buffer_memory_ratio")
    rows = max(1, room // row_bytes)
    if rows == shape[0]:
        return box, None
    part = TensorSlice(name, start, (rows, *shape[1:]))
    return part, TensorSlice(name, (start[0] + rows, *start[1:]), (shape[0] - rows, *shape[1:]))


def _make_segments(items: list[RefitItem], first: int) -> tuple[tuple[Segment, ...], int]:
    """Return the segments of a chunk whose first item has index `first`, and the chunk's size."""
    # A segment begins at the first item, at each large item and after each large item.
    begins = [0]
    for index in range(1, len(items)):
        if items[index - 1].nbytes >= PACKED_BYTES or items[index].nbytes >= PACKED_BYTES:
            begins.append(index)
    segments = []
    for begin, end in pairwise([*begins, len(items)]):
        offset = items[begin].offset
        nbytes = items[end - 1].offset + items[end - 1].nbytes - offset
        segments.append(Segment(first + begin, first + end, offset, nbytes))
    return tuple(segments), align_size(items[-1].offset + items[-1].nbytes)


class ReceivesWeights(Protocol):
    """The methods of an engine that the driver's `Refit` calls."""

    def refit_open(
        self, spec: TransportSpec, plan: RefitPlan, first_rank: int, mode: Mode, in_flight: bool
    ) -> LoadMode:
        """Close the previous transport if any, and join the new one. first_rank: the transport's rank of this engine's
        first worker; the engine's other workers follow.

        Called again while requests run, after another engine was rebuilt. An engine receives with a receiver from
        `refit/transport.py` into a sink from `refit/weight_sink.py`. The plan's tensors have the names of Hugging
        Face's folder. in_flight: True if requests continue during a refit. Raises RefitError for a plan or mode that
        the engine cannot serve.
        """

    def refit_receive(self, header: Header) -> EngineReport:
        """Receive a version and make it live between two steps. The version may be the live one already. Running
        requests keep their tokens and continue with the new version. Their keys and values are kept, or recomputed if
        `EngineSpec.recompute_kv_cache` is true.

        The engine serves the old version or the new one, never a mixture. After an error the engine is unusable: every
        later `submit` raises, and `collect` raises for the requests that ran. There are two exceptions. After
        `Untouched` the old version is live, and requests continue. After `RefitInterrupted` (a peer was lost), requests
        wait. In both cases the driver sends the version again.
        The report has proofs if `header.prove` is true, which only engines with adapters
        (`EngineRules.serves_adapters`) must support.
        """
