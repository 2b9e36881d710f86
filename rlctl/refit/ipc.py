"""Refit within one host through CUDA IPC: receivers read the trainers' memory, nothing goes through the host.

Every trainer rank opens its own shards to the receivers: tensors of the right dtype where they lie, the rest by
way of a ring of buffers that it converts into while receivers copy. Receivers copy with the copy engines straight
to where a tensor belongs, over NVLink or within the device. Counters in shared memory hand chunks over, and the
checksums as a last part; they move only when the device has finished, so no event needs to travel.

Measured on two H200s, Qwen3-8B in bfloat16: 383 GB/s, against 369 for a raw NCCL broadcast.
"""

import os
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlctl.refit.batched_copy import BatchedCopy
from rlctl.refit.checksum import StreamingChecksums
from rlctl.refit.plan import Chunk, RefitPlan
from rlctl.refit.protocol import Header, RefitError, TransportSpec
from rlctl.refit.shared_counters import Deadline, SharedCounters, digest_word
from rlctl.refit.sink import WeightSink, typed
from rlctl.refit.source import WeightSource
from rlctl.refit.staging import ChunkWriter, StagingBuffers
from rlctl.utils.device_stream import DeviceEvent, DeviceStream, Span, elapsed

_VERSION, _DIGEST, _READY, _FIRST = range(4)


class IpcSender:
    """A trainer rank's end: publishes handles once, then counts chunks that are ready."""

    def __init__(self, spec: TransportSpec, source: WeightSource, device: torch.device) -> None:
        self._spec, self._source, self._device = spec, source, device
        self._chunks = [chunk for _, chunk in source.plan.of(source.rank)]
        self._items = [n for chunk in self._chunks for n in chunk.numbers]
        self._place = {n: place for place, n in enumerate(self._items)}
        self._in_place = self._lying()
        self._ring = StagingBuffers(source.plan, self._chunks, spec.num_buffers, device, self._in_place)
        self._pack = ChunkWriter(self._ring, source)
        self._segment = {n: s for c in self._chunks for s in c.segments for n in range(s.first, s.last)}
        self._stream, self._sums = DeviceStream(device), StreamingChecksums(device)
        self._dropped: set[int] = set()
        self._sent = 0
        Path(spec.folder).mkdir(parents=True, exist_ok=True)
        words = _FIRST + spec.receivers + len(self._items)
        self._words = SharedCounters(_words_file(spec, source.rank), words, create=True)
        self._publish()

    def send(self, header: Header) -> dict[str, float]:
        """See `Sender.send`."""
        begin = time.perf_counter()
        if not self._chunks:
            # Receivers take nothing from this rank, not even checksums.
            return self._report([], begin)
        deadline = Deadline(self._spec.timeout_s)
        plan, words = self._source.plan, self._words.array
        checked = plan.checked(header)
        self._sums.start(len(checked))
        words[_VERSION], words[_DIGEST] = header.version, digest_word(header.digest)
        self._stream.follow()
        packing: list[Span] = []
        with self._stream as stream:
            still = [n for chunk in self._chunks if not self._ring.used(chunk) for n in chunk.numbers if n in checked]
            # Processes take turns on a device: first and to the end, if receivers share it, so that nothing of this
            # one's runs while they copy; else last, since they need not wait.
            sums = self._sums_of(still) if self._spec.colocated else None
            begun = stream.mark()
            for number, chunk in enumerate(self._chunks):
                if not self._ring.used(chunk):
                    packing.append((begun, begun))
                    self._announce(packing)
                    continue
                self._wait_taken(number - self._spec.num_buffers + 1, packing, deadline)
                start, slot = stream.mark(), number % self._spec.num_buffers
                self._pack.run(number, chunk, slot)
                packing.append((start, stream.mark()))
                if not number:
                    # The wire stands until the first chunk is there.
                    self._await_packed(packing, deadline)
                self._sums.here([n for n in chunk.numbers if n in checked], partial(self._packed, slot), slot)
                self._announce(packing)
            self._await_packed(packing, deadline)
            self._announce_sums(self._sums_of(still) if sums is None else sums)
        self._wait_taken(len(self._chunks) + 1, packing, deadline)
        self._sent += len(self._chunks) + 1
        return self._report(packing, begin)

    def drop(self, receivers: list[int], reason: str) -> None:
        """See `Sender.drop`."""
        self._dropped.update(receivers)

    def close(self) -> None:
        """See `Sender.close`."""
        self._words.close()
        for file in (_words_file(self._spec, self._source.rank), _handles_file(self._spec, self._source.rank)):
            file.unlink(missing_ok=True)

    def _report(self, packing: list[Span], begin: float) -> dict[str, float]:
        return {
            "pack": elapsed(packing),
            "wire": 0.0,
            "seconds": time.perf_counter() - begin,
            "bytes": sum(self._source.plan.items[n].nbytes for n in self._items),
            "extra_bytes": self._ring.nbytes,
        }

    def _lying(self) -> set[int]:
        """Items that receivers copy from the trainer's own memory. They can convert, but only within one device."""
        return {
            n
            for chunk in self._chunks
            for segment in chunk.segments
            for n in range(segment.first, segment.last)
            if self._spec.colocated or (segment.single and self._source.ready(n))
        }

    def _publish(self) -> None:
        torch.cuda.synchronize(self._device)
        shared: dict[Any, Any] = {n: _share(self._source.view(n)) for n in sorted(self._in_place)}
        places = {n: self._ring.offset(self._segment[n], n) for n in self._items if n not in self._in_place}
        rings = [_share(buffer) for buffer in self._ring.buffers]
        file = _handles_file(self._spec, self._source.rank)
        partial = file.with_suffix(".partial")
        partial.write_bytes(pickle.dumps((self._source.plan.digest, shared, rings, places)))
        partial.chmod(0o600)
        os.replace(partial, file)

    def _announce(self, packing: list[Span]) -> int:
        """Move the ready counter over the chunks that the device has finished; returns how many it has not."""
        words = self._words.array
        while words[_READY] < self._sent + len(packing) and packing[int(words[_READY]) - self._sent][1].reached():
            words[_READY] += 1
        return self._sent + len(packing) - int(words[_READY])

    def _await_packed(self, packing: list[Span], deadline: Deadline) -> None:
        while self._announce(packing):
            deadline.check(lambda: f"refit: trainer rank {self._source.rank} did not finish packing")

    def _packed(self, slot: int, number: int) -> Tensor:
        return self._pack.sent(self._segment[number], number, slot)

    def _sums_of(self, still: list[int]) -> dict[int, int]:
        """Those begun, and of items that lie in place, as they are delivered: receivers that share the device convert
        by themselves. Waits for the device."""
        self._sums.here([n for n in still if self._source.ready(n)], self._source.view, slot=0)
        self._sums.here([n for n in still if not self._source.ready(n)], self._converted)
        self._sums.end(self._stream.mark())
        return self._sums.values()

    def _converted(self, number: int) -> Tensor:
        return self._source.view(number).to(self._source.dtype(number))

    def _announce_sums(self, sums: dict[int, int]) -> None:
        first = _FIRST + self._spec.receivers
        for n, value in sums.items():
            self._words.array[first + self._place[n]] = value
        self._words.array[_READY] += 1

    def _wait_taken(self, count: int, packing: list[Span], deadline: Deadline) -> None:
        """Until every receiver has taken the first `count` chunks of this send."""
        taken = self._words.array[_FIRST : _FIRST + self._spec.receivers]

        def behind() -> list[int]:
            late = taken < self._sent + count
            return [rank for rank in range(1, self._spec.receivers + 1) if late[rank - 1] and rank not in self._dropped]

        def message() -> str:
            done = min(int(taken[rank - 1]) for rank in behind()) - self._sent
            names = [*map(self._source.plan.names, self._chunks), "checksums"]
            place = f"part {done + 1} of {len(names)} ({names[done]})"
            who = ", ".join(map(str, behind()))
            return f"refit: trainer rank {self._source.rank} waited {{}} for engine workers {who} to take {place}"

        while behind():
            self._announce(packing)
            deadline.check(message)


class IpcReceiver:
    """An engine worker's end: maps the trainers' memory at the first refit, then copies chunk by chunk."""

    def __init__(self, spec: TransportSpec, plan: RefitPlan, rank: int, device: torch.device) -> None:
        self._spec, self._plan, self._rank, self._device = spec, plan, rank, device
        self._order = plan.taken_by(rank)
        self._streams = {owner: DeviceStream(device) for owner in plan.owners}
        self._sums = StreamingChecksums(device)
        self._owners: dict[int, _Mapped] = {}
        self._sink: WeightSink | None = None
        self._copies: dict[tuple[int, int], BatchedCopy] = {}

    def receive(self, header: Header, sink: WeightSink) -> dict[str, float]:
        """See `Receiver.receive`."""
        begin = time.perf_counter()
        self._plan.verify(header)
        deadline = Deadline(self._spec.timeout_s)
        checked = self._plan.checked(header)
        if self._sink is not sink:
            self._sink, self._copies, self._sums = sink, {}, StreamingChecksums(self._device)
        self._sums.start(len(checked))
        copying: list[tuple[int, Span]] = []
        ends: dict[int, DeviceEvent] = {}
        self._wire = dict.fromkeys(self._plan.owners, 0.0)
        for stream in self._streams.values():
            stream.follow()
        for number, chunk in self._order:
            owner = self._owner(chunk.owner, deadline)
            owner.await_ready(header, self._message(chunk), deadline, lambda: self._finish(copying))
            with self._streams[chunk.owner] as stream:
                start = stream.mark()
                self._load(number, owner, sink).run()
                taken = [n for n in chunk.numbers if n in checked]
                lying = {n: place for n in taken if (place := sink.target(n)) is not None}
                self._sums.here([n for n in taken if n not in lying], partial(self._passing, owner))
                ends[chunk.owner] = stream.mark()
            self._sums.beside(lying, ends[chunk.owner])
            owner.begun += 1
            copying.append((chunk.owner, (start, ends[chunk.owner])))
        self._sums.end(*ends.values())
        while copying:
            self._finish(copying)
            deadline.check(lambda: f"refit: engine worker {self._rank} did not finish copying")
        self._compare(self._sums.values(), header, deadline)
        wire, seconds = max(self._wire.values()), time.perf_counter() - begin
        return {"wire": wire, "load": 0.0, "seconds": seconds, "bytes": self._plan.payload, "extra_bytes": 0}

    def close(self) -> None:
        """See `Receiver.close`."""
        for owner in self._owners.values():
            owner.words.close()
        self._owners = {}

    def _passing(self, owner: "_Mapped", number: int) -> Tensor:
        """An item in the owner's memory, as it is to be delivered."""
        dtype = getattr(torch, self._plan.entries[self._plan.items[number].entry].dtype)
        return owner.view(number, self._plan, owner.begun).to(dtype)

    def _load(self, number: int, owner: "_Mapped", sink: WeightSink) -> BatchedCopy:
        """What brings chunk `number` out of the owner's memory; prepared once for each buffer it passes through."""
        chunk, key = self._plan.chunks[number], (number, owner.slot(owner.begun))
        if key not in self._copies:
            self._copies[key] = sink.copies((n, owner.view(n, self._plan, owner.begun)) for n in chunk.numbers)
        return self._copies[key]

    def _owner(self, rank: int, deadline: Deadline) -> "_Mapped":
        if rank not in self._owners:
            self._owners[rank] = _Mapped(self._spec, self._plan, rank, self._rank, self._device, deadline)
        return self._owners[rank]

    def _finish(self, copying: list[tuple[int, Span]]) -> None:
        """Give back what the device has copied; an owner's chunks end in order, those of several owners need not."""
        for part in [part for part in copying if part[1][1].reached()]:
            copying.remove(part)
            owner, (begin, end) = part
            self._owners[owner].take()
            self._wire[owner] += end.seconds_since(begin)

    def _compare(self, received: dict[int, int], header: Header, deadline: Deadline) -> None:
        for rank, owner in self._owners.items():
            late = f"refit: engine worker {self._rank} waited {{}} for trainer rank {rank}'s checksums"
            owner.await_ready(header, lambda late=late: late, deadline, lambda: None)  # type: ignore[misc]
            for n in self._plan.checked_of(rank, header):
                if received[n] != owner.sum(n):
                    name = self._plan.items[n].box.name
                    raise RefitError(f"{name} arrived changed from trainer rank {rank} (version {header.version})")
            owner.begun += 1
            owner.take()

    def _message(self, chunk: Chunk) -> Callable[[], str]:
        names = self._plan.names(chunk)
        return lambda: f"refit: engine worker {self._rank} waited {{}} for trainer rank {chunk.owner} to send {names}"


class _Mapped:
    """One trainer rank's memory, as a receiver sees it."""

    def __init__(
        self, spec: TransportSpec, plan: RefitPlan, owner: int, rank: int, device: torch.device, deadline: Deadline
    ) -> None:
        file = _handles_file(spec, owner)
        while not file.exists():
            deadline.check(lambda: f"refit: engine worker {rank} waited {{}} for trainer rank {owner} to open")
        digest, shared, rings, self._places = pickle.loads(file.read_bytes())
        if digest != plan.digest:
            raise RefitError(f"trainer rank {owner} sends by plan {digest}, this end was given plan {plan.digest}")
        self._shared = {n: _open(handle, device) for n, handle in shared.items()}
        self._rings = [_open(handle, device) for handle in rings]
        self._word = {n: word for word, n in enumerate(n for _, chunk in plan.of(owner) for n in chunk.numbers)}
        self._parts = sum(1 for _ in plan.of(owner)) + 1
        self._first, self._rank, self._owner = _FIRST + spec.receivers, rank, owner
        self.words = SharedCounters(_words_file(spec, owner), self._first + len(self._word), create=False)
        self.begun = int(self.words.array[_FIRST + rank - 1])

    def view(self, number: int, plan: RefitPlan, begun: int) -> Tensor:
        """Item `number` in the trainer's memory, shaped as its box."""
        if number in self._shared:
            tensor: Tensor = self._shared[number]
            return tensor
        item = plan.items[number]
        buffer = self._rings[self.slot(begun)]
        return typed(buffer, self._places[number], plan.entries[item.entry].dtype, item.box.shape)

    def slot(self, begun: int) -> int:
        """Which buffer the owner's part number `begun` passes through."""
        return begun % self._parts % max(1, len(self._rings))

    def await_ready(
        self, header: Header, message: Callable[[], str], deadline: Deadline, meanwhile: Callable[[], None]
    ) -> None:
        """Until the owner's next part may be read; it must be of the header's version."""
        words = self.words.array
        while words[_READY] <= self.begun:
            meanwhile()
            deadline.check(message)
        if (words[_VERSION], words[_DIGEST]) != (header.version, digest_word(header.digest)):
            raise RefitError(
                f"expected version {header.version} of plan {header.digest}, trainer rank {self._owner} sends "
                f"version {words[_VERSION]}"
            )

    def take(self) -> None:
        """Give one more part back to its owner."""
        self.words.array[_FIRST + self._rank - 1] += 1

    def sum(self, number: int) -> int:
        """What the owner announced of item `number`."""
        return int(self.words.array[self._first + self._word[number]])


def _share(tensor: Tensor) -> Any:
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def _open(handle: tuple[Any, tuple[Any, ...]], device: torch.device) -> Tensor:
    """A shared tensor, on this process's own device: the sender's index means nothing here."""
    rebuild, args = handle
    storage_device = 6
    tensor: Tensor = rebuild(*args[:storage_device], device.index or 0, *args[storage_device + 1 :])
    return tensor.detach()


def _words_file(spec: TransportSpec, owner: int) -> Path:
    return Path(spec.folder) / f"ipc-{owner}.words"


def _handles_file(spec: TransportSpec, owner: int) -> Path:
    return Path(spec.folder) / f"ipc-{owner}.handles"
