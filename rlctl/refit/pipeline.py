"""The way of a chunk from a trainer rank to an engine worker, the same for every transport.

    sender:    await a free buffer -> pack the chunk -> make it visible -> sum its checked items
    receiver:  await the chunk -> load it -> sum its checked items -> give its buffer back

All checksums follow as a last part, which the receiver compares. A transport (`SenderTransport`, `ReceiverTransport`)
is only how a chunk becomes visible and how its buffer comes back. On CUDA packing, the wire and loading have separate
streams: the host queues work and does not wait, except where a transport says so.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
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
from rlctl.utils.device_stream import DeviceEvent, DeviceStream, Span, elapsed


class ChunkBuffers(Protocol):
    """Memory into which a sender packs, see `StagingBuffers`."""

    @property
    def nbytes(self) -> int: ...

    def used(self, chunk: Chunk) -> bool: ...

    def view(self, number: int, slot: int) -> Tensor | None: ...


class SenderTransport(ABC):
    """A trainer rank's side of a transport. Chunks are numbered by this rank's sending order."""

    # Items that have no place in these are sent from where they lie.
    buffers: ChunkBuffers
    # When checksums of chunks without a buffer are taken. "first": they are known before engines begin to copy.
    unbuffered_sums: Literal["first", "in turn", "last"] = "in turn"
    # Seconds that the last version's chunks were on the wire.
    wire = 0.0

    @property
    def extra_bytes(self) -> int:
        """Memory that it holds for refits."""
        return self.buffers.nbytes

    @abstractmethod
    def begin(self, header: Header, deadline: Deadline) -> None:
        """Prepare to send a version, before any chunk is packed."""

    @abstractmethod
    def await_buffer(self, number: int, packing: DeviceStream) -> int:
        """Return the buffer of chunk `number` once it is free, or once the packing stream waits for that."""

    @abstractmethod
    def publish(self, number: int, slot: int, packed: Span) -> None:
        """Make chunk `number` visible to receivers once it is packed."""

    @abstractmethod
    def publish_sums(self, sums: StreamingChecksums, packing: DeviceStream) -> None:
        """Make the checksums visible; the work that they cover is queued on the packing stream."""

    def finish(self) -> None:  # noqa: B027
        """Wait until the weights may change again. Raises PeerLost naming the receiver and tensor at fault."""

    def drop(self, receivers: list[int], reason: str) -> None:  # noqa: B027
        """Wait no longer for these receivers (ranks from 1) in the current refit; called from another thread.

        A transport that needs every receiver ends the refit with a RefitError of that reason.
        """

    def abort(self) -> None:  # noqa: B027
        """End the current refit after a PeerLost."""

    @abstractmethod
    def close(self) -> None:
        """Free buffers, files and groups."""


class ReceiverTransport(ABC):
    """An engine worker's side of a transport. Chunks are numbered by the plan."""

    # (number, chunk) in the order in which this worker takes them.
    order: Sequence[tuple[int, Chunk]]
    # Memory of its buffers.
    extra_bytes = 0

    @abstractmethod
    def begin(self, header: Header, sink: WeightSink, deadline: Deadline) -> None:
        """Wait until a version is announced. Raises RefitError if it is another version or plan than the header's."""

    @abstractmethod
    def arrive(self, number: int, chunk: Chunk, meanwhile: Callable[[], object]) -> tuple[int, DeviceStream]:
        """Return the buffer in which chunk `number` arrives, and the stream to load it on after its arrival.

        meanwhile: to be called while the host waits.
        """

    @abstractmethod
    def view(self, number: int, slot: int) -> Tensor | None:
        """Return item `number` where it becomes visible (any dtype and strides); None if that is where it belongs.

        An item and slot have the same memory in every refit.
        """

    def placed(self, number: int, slot: int, sink: WeightSink) -> Tensor | None:
        """Return item `number` in its place, of which its checksum is taken; None: take it of `view`."""
        return sink.target(number)

    def loaded(self, chunk: Chunk, end: DeviceEvent) -> None:  # noqa: B027
        """Note that loading the chunk is queued up to `end`."""

    def give_back(self, chunk: Chunk) -> None:  # noqa: B027
        """Give the buffer of a chunk that the device has loaded back to its owner."""

    @abstractmethod
    def sums(self, owner: int, header: Header) -> dict[int, int]:
        """Return the checksums that trainer rank `owner` announces, by item."""

    @abstractmethod
    def times(self, loading: dict[int, float]) -> tuple[float, float]:
        """Return the seconds of wire and of loading. loading: seconds that each owner's chunks took to load."""

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
        self._transport, self._source, self._timeout_s = transport, source, timeout_s
        self._chunks = source.chunks
        self._size = sum(source.plan.items[n].nbytes for chunk in self._chunks for n in chunk.numbers)
        self._packing, self._sums = DeviceStream(device), StreamingChecksums(device)
        # By chunk and buffer.
        self._copies: dict[tuple[int, int], BatchedCopy] = {}
        self.drop = transport.drop

    def send(self, header: Header) -> SendReport:
        """Send this rank's chunks; return when the weights may change again.

        Raises RefitError naming the receiver and tensor at fault once the deadline passed, or the reason given to
        `drop`.
        """
        begin, packed = time.perf_counter(), list[Span]()
        if self._chunks:
            try:
                self._transport.begin(header, Deadline(self._timeout_s))
                packed = self._queue(header)
                self._transport.finish()
            except PeerLost:
                self._transport.abort()
                raise
        seconds = time.perf_counter() - begin
        report = SendReport(elapsed(packed), self._transport.wire, seconds, self._size, self._transport.extra_bytes)
        return replace(report, digest=digest_of(self._sums.values())) if header.prove and self._chunks else report

    def close(self) -> None:
        """Free buffers, files and groups."""
        self._transport.close()
        self._sums.close()
        self._copies = {}

    def _queue(self, header: Header) -> list[Span]:
        """Pack, publish and sum every chunk; return the spans of packing."""
        transport, checked, packed = self._transport, self._source.plan.checked(header), list[Span]()
        when = transport.unbuffered_sums
        apart = [chunk for chunk in self._chunks if when != "in turn" and not transport.buffers.used(chunk)]
        # Before anything is on the wire: asking for memory may wait for the device, and so for receivers.
        self._sums.start(len(checked))
        self._packing.follow()
        with self._packing as stream:
            # Processes take turns on a device: checksums come first and to the end if receivers share it, so that
            # nothing of this process runs while they copy; else last, since no receiver needs to wait.
            if when == "first":
                self._sum_unbuffered(apart, checked)
                self._sums.values(stream)
            begun = stream.mark()
            for number, chunk in enumerate(self._chunks):
                used, slot = transport.buffers.used(chunk), 0
                packed.append((begun, begun))
                if used:
                    slot = transport.await_buffer(number, stream)
                    packed[-1] = self._pack(number, chunk, slot)
                transport.publish(number, slot, packed[-1])
                # Only now, for the wire would wait while they are queued.
                if used or when == "in turn":
                    self._sums.here([n for n in chunk.numbers if n in checked], partial(self._sent, slot), slot)
            if when == "last":
                self._sum_unbuffered(apart, checked)
            transport.publish_sums(self._sums, stream)
        return packed

    def _pack(self, number: int, chunk: Chunk, slot: int) -> Span:
        """Queue the copies of a chunk into its buffer, converted to the dtype that travels."""
        begin = self._packing.mark()
        if (number, slot) not in self._copies:
            places = ((self._transport.buffers.view(n, slot), self._source.view(n)) for n in chunk.numbers)
            self._copies[number, slot] = BatchedCopy((place, view) for place, view in places if place is not None)
        self._copies[number, slot].run()
        return begin, self._packing.mark()

    def _sent(self, slot: int, number: int) -> Tensor:
        """Return item `number` as it travels: in its buffer, or where it lies."""
        place = self._transport.buffers.view(number, slot)
        return self._source.view(number) if place is None else place

    def _sum_unbuffered(self, chunks: list[Chunk], checked: Collection[int]) -> None:
        """Sum items as they are delivered: receivers that share the device convert by themselves."""
        source = self._source
        numbers = [n for chunk in chunks for n in chunk.numbers if n in checked]
        self._sums.here([n for n in numbers if source.ready(n)], source.view, slot=0)
        converted = [n for n in numbers if not source.ready(n)]
        self._sums.here(converted, lambda n: source.view(n).to(getattr(torch, source.plan.dtype(n))))


class ChunkReceiver:
    """An engine worker's end of a refit."""

    def __init__(
        self, transport: ReceiverTransport, plan: RefitPlan, rank: int, device: torch.device, timeout_s: float
    ) -> None:
        self._transport, self._plan, self._rank = transport, plan, rank
        self._device, self._timeout_s = device, timeout_s
        self._sink: WeightSink | None = None
        self._sums = StreamingChecksums(device)
        # By chunk and buffer.
        self._copies: dict[tuple[int, int], BatchedCopy] = {}
        # Checksums of the last version, by item, which are those that the senders announced.
        self.received: dict[int, int] = {}
        # Chunks that are being loaded, by owner.
        self._loading: dict[int, deque[tuple[Chunk, Span]]] = {}
        # Seconds of loading by owner.
        self._seconds: dict[int, float] = {}

    def receive(self, header: Header, sink: WeightSink) -> ReceiveReport:
        """Put every item of the plan into `sink`, whole and checked when this returns (device work included).

        Raises RefitError: another version or plan than announced, a wrong checksum (names the tensor), a sender out of
        time (names its rank and tensor).
        """
        begin, deadline, transport = time.perf_counter(), Deadline(self._timeout_s), self._transport
        self._plan.verify(header)
        if self._sink is not sink:
            self._sink, self._copies, self._sums = sink, {}, StreamingChecksums(self._device)
        checked = self._plan.checked(header)
        # Before the header comes: from then on the wire waits for queued work.
        self._sums.start(len(checked))
        self._loading = {owner: deque() for owner in self._plan.owners}
        self._seconds = dict.fromkeys(self._plan.owners, 0.0)
        try:
            transport.begin(header, sink, deadline)
            for number, chunk in transport.order:
                self._queue_load(number, chunk, checked, sink)
            while left := self._give_back():
                deadline.check(partial(late, self._plan, self._rank, left))
            self.received = received = self._sums.values()
            for owner in self._plan.owners:
                for number, value in transport.sums(owner, header).items():
                    if received[number] != value:
                        name = self._plan.items[number].box.name
                        raise RefitError(f"{name} arrived changed from trainer rank {owner} (version {header.version})")
            transport.finish(header)
        except RefitError:
            transport.abort()
            raise
        wire, load = transport.times(self._seconds)
        seconds = time.perf_counter() - begin
        return ReceiveReport(wire, load, seconds, self._plan.payload, transport.extra_bytes)

    def close(self) -> None:
        """Free buffers, files and groups."""
        self._transport.close()
        self._sums.close()
        self._copies = {}

    def _queue_load(self, number: int, chunk: Chunk, checked: Collection[int], sink: WeightSink) -> None:
        """Queue the loading of a chunk, and its checksums."""
        transport = self._transport
        slot, stream = transport.arrive(number, chunk, self._give_back)
        with stream:
            begin = stream.mark()
            if (number, slot) not in self._copies:
                views = ((n, transport.view(n, slot)) for n in chunk.numbers)
                self._copies[number, slot] = sink.copies((n, view) for n, view in views if view is not None)
            self._copies[number, slot].run()
            taken = [n for n in chunk.numbers if n in checked]
            placed = {n: place for n in taken if (place := transport.placed(n, slot, sink)) is not None}
            passing = [n for n in taken if n not in placed]
            converted = [n for n in passing if self._converts(n, slot)]
            # A converted item is in memory of the moment.
            self._sums.here(converted, partial(self._delivered, slot))
            rest = passing if not converted else sorted({*passing} - {*converted})
            self._sums.here(rest, partial(self._delivered, slot), slot)
            end = stream.mark()
        self._sums.beside(placed, end, slot)
        transport.loaded(chunk, end)
        self._loading[chunk.owner].append((chunk, (begin, end)))

    def _converts(self, number: int, slot: int) -> bool:
        view = self._transport.view(number, slot)
        return view is not None and view.dtype != getattr(torch, self._plan.dtype(number))

    def _delivered(self, slot: int, number: int) -> Tensor:
        """Return item `number` where it becomes visible, in the dtype in which it is delivered."""
        view = self._transport.view(number, slot)
        assert view is not None, "an item without a place passes through a buffer"
        return view.to(getattr(torch, self._plan.dtype(number)))

    def _give_back(self) -> Chunk | None:
        """Let go of chunks that the device has loaded; return one that it still loads.

        Chunks of one owner end in order, so only its first is asked for: the engine's thread, which samples meanwhile,
        waits while this one asks.
        """
        left = None
        for parts in self._loading.values():
            while parts and parts[0][1][1].reached():
                chunk, (begin, end) = parts.popleft()
                self._transport.give_back(chunk)
                self._seconds[chunk.owner] += end.seconds_since(begin)
            if parts:
                left = left or parts[0][0]
        return left


def late(plan: RefitPlan, rank: int, chunk: Chunk) -> str:
    """Return the message of an engine worker that waited too long for a chunk; {} becomes the time waited."""
    return f"refit: engine worker {rank} waited {{}} for trainer rank {chunk.owner} to send {plan.names(chunk)}"
