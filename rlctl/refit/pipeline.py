"""Transfer of chunks from trainer ranks to engine workers: the steps that all transports share.

    sender:    await a free buffer -> pack the chunk -> make it visible -> sum its checked items
    receiver:  await the chunk -> load it -> sum its checked items -> give its buffer back

"Pack" means to convert items and copy them into a buffer, "load" to copy them into the engine's parameters, "sum" to
compute checksums. The sender's checksums follow the last chunk, and the receiver compares them with those that it has
computed. A transport (`SenderTransport`, `ReceiverTransport`) only defines how a chunk becomes visible and how its
buffer becomes free. On CUDA, packing, transfer and loading have separate streams: the host queues work and does not
wait, unless a transport needs to.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from rlctl.refit.checksum import StreamingChecksums
from rlctl.refit.protocol import Header, PeerLost, ReceiveReport, RefitError, SendReport, digest_of
from rlctl.refit.refit_plan import Chunk, RefitPlan
from rlctl.refit.shared_counters import Deadline
from rlctl.refit.weight_sink import BatchedCopy, WeightSink
from rlctl.refit.weight_source import WeightSource
from rlctl.utils.device_stream import DeviceEvent, DeviceStream, Span, total_seconds


class ChunkBuffers(Protocol):
    """Memory into which a sender packs chunks, see `StagingBuffers`."""

    @property
    def nbytes(self) -> int: ...

    def has_items_of(self, chunk: Chunk) -> bool: ...

    def view(self, number: int, slot: int) -> Tensor | None: ...


class SenderTransport(ABC):
    """A trainer rank's side of a transport. Chunks are numbered in this rank's sending order."""

    # Buffers into which chunks are packed. Items that have no buffer are sent directly from the trainer's memory.
    buffers: ChunkBuffers
    # When checksums of chunks without a buffer are computed. "first": before any engine begins to copy.
    unbuffered_sums: Literal["first", "in turn", "last"] = "in turn"
    # Seconds from the last version's first packed chunk to the end of transfers; 0 if receivers fetch chunks.
    wire = 0.0

    @property
    def extra_bytes(self) -> int:
        """Bytes of memory that this side has allocated for refits."""
        return self.buffers.nbytes

    @abstractmethod
    def begin(self, header: Header, deadline: Deadline) -> None:
        """Prepare to send a version. Called before any chunk is packed."""

    @abstractmethod
    def await_buffer(self, number: int, packing: DeviceStream) -> int:
        """Return the buffer for chunk `number`. Either the buffer is free on return, or the packing stream waits until
        it is."""

    @abstractmethod
    def publish(self, number: int, slot: int, packed: Span) -> None:
        """Make chunk `number` visible to receivers after the device has packed it. packed: begin and end of packing."""

    @abstractmethod
    def publish_sums(self, sums: StreamingChecksums, packing: DeviceStream) -> None:
        """Make the checksums visible to receivers. They are queued on the packing stream."""

    def finish(self) -> None:  # noqa: B027
        """Wait until the weights may change again. Raises PeerLost that names the receiver and tensor at fault."""

    def drop(self, receivers: list[int], reason: str) -> None:  # noqa: B027
        """Stop waiting for these receivers (ranks from 1) in the current refit. Called from another thread.

        A transport that needs every receiver makes the current refit raise a RefitError with `reason`.
        """

    def abort(self) -> None:  # noqa: B027
        """End the current refit after a PeerLost."""

    @abstractmethod
    def close(self) -> None:
        """Free buffers, files and groups."""


class ReceiverTransport(ABC):
    """An engine worker's side of a transport. Chunks are numbered by the plan."""

    # (number, chunk) of all chunks in the order in which this worker receives them.
    order: Sequence[tuple[int, Chunk]]
    # Bytes of this side's buffers; 0 for a transport that has none.
    extra_bytes = 0

    @abstractmethod
    def begin(self, header: Header, sink: WeightSink, deadline: Deadline) -> None:
        """Wait until a version is announced. Raises RefitError if its version or plan differs from the header's."""

    @abstractmethod
    def arrive(self, number: int, chunk: Chunk, meanwhile: Callable[[], object]) -> tuple[int, DeviceStream]:
        """Return the buffer in which chunk `number` arrives, and the stream on which the caller must queue its loading.

        meanwhile: call it repeatedly while the host waits.
        """

    @abstractmethod
    def view(self, number: int, slot: int) -> Tensor | None:
        """Return arrived item `number` (any dtype and strides); None if it arrived directly in its place in the engine.

        For equal `number` and `slot` the memory is the same in every refit.
        """

    def lasting_item(self, number: int, slot: int, sink: WeightSink) -> Tensor | None:
        """Return item `number` in memory that stays unchanged after loading, to compute its checksum later. None:
        compute the checksum from `view`, before the buffer is given back."""
        return sink.target(number)

    def note_load(self, chunk: Chunk, end: DeviceEvent) -> None:  # noqa: B027
        """Note that the loading of the chunk is queued. end: event after it."""

    def give_back(self, chunk: Chunk) -> None:  # noqa: B027
        """Free the buffer of a chunk for its owner. The device has loaded the chunk."""

    @abstractmethod
    def sums(self, owner: int, header: Header) -> dict[int, int]:
        """Return the checksums that trainer rank `owner` announces: item's number -> checksum."""

    @abstractmethod
    def times(self, loading: dict[int, float]) -> tuple[float, float]:
        """Return (seconds of transfer, seconds of loading). loading: owner -> seconds that its chunks took to load."""

    def finish(self, header: Header) -> None:  # noqa: B027
        """Raise RefitError if the version was overwritten while it was read."""

    def abort(self) -> None:  # noqa: B027
        """End the current refit after a RefitError."""

    @abstractmethod
    def close(self) -> None:
        """Free buffers, files and groups."""


class ChunkSender:
    """A trainer rank's end of a refit."""

    def __init__(
        self, transport: SenderTransport, source: WeightSource, device: torch.device, timeout_s: float
    ) -> None:
        self._transport = transport
        self._source = source
        self._timeout_s = timeout_s
        self._chunks = source.chunks
        # Number of bytes of this rank's items.
        self._size = 0
        for chunk in self._chunks:
            self._size += sum(source.plan.items[number].nbytes for number in chunk.numbers)
        self._packing = DeviceStream(device)
        self._sums = StreamingChecksums(device)
        # (chunk's number, buffer) -> copies that pack the chunk. Kept for later refits.
        self._copies: dict[tuple[int, int], BatchedCopy] = {}
        self.drop = transport.drop

    def send(self, header: Header) -> SendReport:
        """Send this rank's chunks; return when the weights may change again.

        Raises RefitError after the deadline, naming the receiver and tensor at fault, or with the reason from `drop`.
        """
        begin = time.perf_counter()
        packed: list[Span] = []
        if self._chunks:
            try:
                self._transport.begin(header, Deadline(self._timeout_s))
                packed = self._queue_chunks(header)
                self._transport.finish()
            except PeerLost:
                self._transport.abort()
                raise
        seconds = time.perf_counter() - begin
        return SendReport(
            pack=total_seconds(packed),
            wire=self._transport.wire,
            seconds=seconds,
            bytes=self._size,
            extra_bytes=self._transport.extra_bytes,
            digest=digest_of(self._sums.values()) if header.prove and self._chunks else 0,
        )

    def close(self) -> None:
        """Free buffers, files and groups."""
        self._transport.close()
        self._sums.close()
        self._copies = {}

    def _queue_chunks(self, header: Header) -> list[Span]:
        """Queue packing, publishing and checksums of every chunk; return the spans of packing."""
        transport = self._transport
        checked = self._source.plan.checked_items(header)
        packed: list[Span] = []
        when_unbuffered = transport.unbuffered_sums
        # Call `start` before any transfer: it allocates memory, and may so wait for the device and for receivers.
        self._sums.start(len(checked))
        self._packing.follow()
        with self._packing as stream:
            # Processes take turns on a device. If receivers share this device ("first"), finish the checksums of chunks
            # without a buffer now, so that no kernel of this process runs while receivers copy. Otherwise ("last"),
            # compute these checksums last, because no receiver waits for them.
            if when_unbuffered == "first":
                self._sum_unbuffered(checked)
                self._sums.values(stream)
            packing_start = stream.mark()
            for number, chunk in enumerate(self._chunks):
                slot = 0
                span = packing_start, packing_start
                is_buffered = transport.buffers.has_items_of(chunk)
                if is_buffered:
                    slot = transport.await_buffer(number, stream)
                    span = self._pack_chunk(number, chunk, slot)
                packed.append(span)
                transport.publish(number, slot, span)
                # Queued after `publish`, so that the transfer need not wait for checksums.
                if is_buffered or when_unbuffered == "in turn":
                    chunk_items = [item for item in chunk.numbers if item in checked]
                    self._sums.queue(chunk_items, partial(self._sent_item, slot), slot)
            if when_unbuffered == "last":
                self._sum_unbuffered(checked)
            transport.publish_sums(self._sums, stream)
        return packed

    def _pack_chunk(self, number: int, chunk: Chunk, slot: int) -> Span:
        """Queue copying a chunk's items into its buffer, converted to the dtype in which they are sent."""
        begin = self._packing.mark()
        if (number, slot) not in self._copies:
            pairs = []
            for item in chunk.numbers:
                place = self._transport.buffers.view(item, slot)
                if place is not None:
                    pairs.append((place, self._source.view(item)))
            self._copies[number, slot] = BatchedCopy(pairs)
        self._copies[number, slot].run()
        return begin, self._packing.mark()

    def _sent_item(self, slot: int, number: int) -> Tensor:
        """Return item `number` in the memory from which it is sent: its buffer, or the trainer's memory."""
        place = self._transport.buffers.view(number, slot)
        return self._source.view(number) if place is None else place

    def _sum_unbuffered(self, checked: Collection[int]) -> None:
        """Queue the checksums of items in chunks without a buffer, in the dtype that the receivers convert to."""
        source = self._source
        ready: list[int] = []
        converted: list[int] = []
        for chunk in self._chunks:
            if self._transport.buffers.has_items_of(chunk):
                continue
            for number in chunk.numbers:
                if number not in checked:
                    continue
                if source.is_ready(number):
                    ready.append(number)
                else:
                    converted.append(number)
        self._sums.queue(ready, source.view, slot=0)
        self._sums.queue(converted, lambda number: source.view(number).to(getattr(torch, source.plan.dtype(number))))


class ChunkReceiver:
    """An engine worker's end of a refit."""

    def __init__(
        self, transport: ReceiverTransport, plan: RefitPlan, rank: int, device: torch.device, timeout_s: float
    ) -> None:
        self._transport = transport
        self._plan = plan
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._sink: WeightSink | None = None
        self._sums = StreamingChecksums(device)
        # (chunk's number, buffer) -> copies that load the chunk. Kept for later refits.
        self._copies: dict[tuple[int, int], BatchedCopy] = {}
        # Item's number -> checksum of the last version, equal to the announced checksum.
        self.received: dict[int, int] = {}
        # Owner -> its chunks that are being loaded, oldest first.
        self._loading: dict[int, deque[tuple[Chunk, Span]]] = {}
        # Owner -> seconds of loading.
        self._seconds: dict[int, float] = {}

    def receive(self, header: Header, sink: WeightSink) -> ReceiveReport:
        """Receive every item of the plan into `sink`. On return all items are loaded and checked, also on the device.

        Raises RefitError if a sender sends another version or plan than `header` announces, if a checksum is wrong
        (names the tensor), or if a sender is late (names its rank and tensor).
        """
        begin = time.perf_counter()
        deadline = Deadline(self._timeout_s)
        transport = self._transport
        self._plan.verify(header)
        if self._sink is not sink:
            self._sink = sink
            self._copies = {}
            self._sums = StreamingChecksums(self._device)
        checked = self._plan.checked_items(header)
        # Call `start` before the header is received, because transfers would wait for this work afterwards.
        self._sums.start(len(checked))
        self._loading = {owner: deque() for owner in self._plan.owners}
        self._seconds = dict.fromkeys(self._plan.owners, 0.0)
        try:
            transport.begin(header, sink, deadline)
            for number, chunk in transport.order:
                self._queue_load(number, chunk, checked, sink)
            while unfinished := self._give_back():
                deadline.check(partial(describe_late, self._plan, self._rank, unfinished))
            self.received = self._sums.values()
            for owner in self._plan.owners:
                for number, checksum in transport.sums(owner, header).items():
                    if self.received[number] != checksum:
                        name = self._plan.items[number].box.name
                        raise RefitError(f"{name} arrived changed from trainer rank {owner} (version {header.version})")
            transport.finish(header)
        except RefitError:
            transport.abort()
            raise
        wire, load = transport.times(self._seconds)
        return ReceiveReport(
            wire=wire,
            load=load,
            seconds=time.perf_counter() - begin,
            bytes=self._plan.payload,
            extra_bytes=transport.extra_bytes,
        )

    def close(self) -> None:
        """Free buffers, files and groups."""
        self._transport.close()
        self._sums.close()
        self._copies = {}

    def _queue_load(self, number: int, chunk: Chunk, checked: Collection[int], sink: WeightSink) -> None:
        """Wait for a chunk, and queue its loading and its checksums."""
        transport = self._transport
        slot, stream = transport.arrive(number, chunk, self._give_back)
        with stream:
            begin = stream.mark()
            if (number, slot) not in self._copies:
                views = [(item, transport.view(item, slot)) for item in chunk.numbers]
                self._copies[number, slot] = sink.copies((item, view) for item, view in views if view is not None)
            self._copies[number, slot].run()
            lasting: dict[int, Tensor] = {}
            converted: list[int] = []
            unconverted: list[int] = []
            for item in chunk.numbers:
                if item not in checked:
                    continue
                place = transport.lasting_item(item, slot, sink)
                if place is not None:
                    lasting[item] = place
                elif self._is_converted(item, slot):
                    converted.append(item)
                else:
                    unconverted.append(item)
            # No slot, because a converted item has new memory in each refit.
            self._sums.queue(converted, partial(self._delivered_item, slot))
            self._sums.queue(unconverted, partial(self._delivered_item, slot), slot)
            end = stream.mark()
        self._sums.queue_lasting(lasting, end, slot)
        transport.note_load(chunk, end)
        self._loading[chunk.owner].append((chunk, (begin, end)))

    def _is_converted(self, number: int, slot: int) -> bool:
        view = self._transport.view(number, slot)
        return view is not None and view.dtype != getattr(torch, self._plan.dtype(number))

    def _delivered_item(self, slot: int, number: int) -> Tensor:
        """Return arrived item `number`, converted to the plan's dtype."""
        view = self._transport.view(number, slot)
        assert view is not None, "an item without a place passes through a buffer"
        return view.to(getattr(torch, self._plan.dtype(number)))

    def _give_back(self) -> Chunk | None:
        """Free the buffers of chunks that the device has loaded; return a chunk that is still loading, or None.

        The loads of one owner's chunks end in order, so only the oldest load of each owner is queried. Each query
        delays the engine's thread, which samples meanwhile.
        """
        unfinished = None
        for queue in self._loading.values():
            while queue:
                chunk, (begin, end) = queue[0]
                if not end.is_reached():
                    unfinished = unfinished or chunk
                    break
                queue.popleft()
                self._transport.give_back(chunk)
                self._seconds[chunk.owner] += end.seconds_since(begin)
        return unfinished


def describe_late(plan: RefitPlan, rank: int, chunk: Chunk) -> str:
    """Return the error text of an engine worker that waited too long for a chunk, with {} for the time waited."""
    return f"refit: engine worker {rank} waited {{}} for trainer rank {chunk.owner} to send {plan.names(chunk)}"
