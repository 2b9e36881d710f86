"""Refit within one host through CUDA IPC: receivers read the trainers' memory, nothing goes through the host.

Every trainer rank opens its own shards to the receivers: tensors of the right dtype where they lie, the rest by
way of a ring of buffers that it converts into while receivers copy. Receivers copy with the copy engines straight
to where a tensor belongs, over NVLink or within the device. Counters in shared memory hand chunks over, and the
checksums as a last part; they move only when the device has finished, so no event needs to travel.

Measured on two H200s, Qwen3-8B in bfloat16: 383 GB/s, against 369 for a raw NCCL broadcast.
"""

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlctl.refit.checksum import StreamingChecksums
from rlctl.refit.pipeline import ReceiverTransport, SenderTransport, late
from rlctl.refit.protocol import Header, RefitError, TransportSpec
from rlctl.refit.refit_plan import Chunk, RefitPlan
from rlctl.refit.shared_counters import Deadline, SharedCounters, digest_word
from rlctl.refit.staging import StagingBuffers
from rlctl.refit.weight_sink import WeightSink, typed
from rlctl.refit.weight_source import WeightSource
from rlctl.utils.device_stream import DeviceEvent, DeviceStream, Span

# Words of an owner: version and plan sent, parts ready, then the parts taken by each receiver, then its items'
# checksums. Parts are its chunks and, last, the checksums; they are counted over all versions.
_VERSION, _DIGEST, _READY, _FIRST = range(4)


class IpcSender(SenderTransport):
    """A trainer rank's side: publishes handles once, then counts chunks that are ready."""

    buffers: StagingBuffers

    def __init__(self, spec: TransportSpec, source: WeightSource, device: torch.device) -> None:
        self._spec, self._source = spec, source
        self._chunks = source.chunks
        self._items = [n for chunk in self._chunks for n in chunk.numbers]
        # Receivers copy these from the trainer's own memory. They can convert, but only within one device.
        in_place = set(self._items) if spec.colocated else source.ready_singles()
        self.buffers = StagingBuffers(source.plan, self._chunks, spec.num_buffers, device, in_place)
        self.unbuffered_sums = "first" if spec.colocated else "last"
        self._dropped: set[int] = set()
        # Parts of all earlier versions.
        self._sent = 0
        Path(spec.folder).mkdir(parents=True, exist_ok=True)
        words = _FIRST + spec.receivers + len(self._items)
        self._words = SharedCounters(_words_file(spec, source.rank), words, create=True)
        torch.cuda.synchronize(device)
        shared = {n: share(source.view(n)) for n in self._items if n not in self.buffers.offsets}
        rings = [share(buffer) for buffer in self.buffers.buffers]
        file = _handles_file(spec, source.rank)
        partial = file.with_suffix(".partial")
        partial.write_bytes(pickle.dumps((source.plan.digest, shared, rings, self.buffers.offsets)))
        partial.chmod(0o600)
        os.replace(partial, file)

    def begin(self, header: Header, deadline: Deadline) -> None:
        self._deadline, self._packed = deadline, list[Span]()
        self._words.array[_VERSION], self._words.array[_DIGEST] = header.version, digest_word(header.digest)

    def await_buffer(self, number: int, packing: DeviceStream) -> int:
        self._announce()
        self._wait_taken(number - self._spec.num_buffers + 1)
        return number % self._spec.num_buffers

    def publish(self, number: int, slot: int, packed: Span) -> None:
        self._packed.append(packed)
        # Nothing is on the link until the first chunk is there, and the last one must not wait for checksums.
        first = number == 0 and self.buffers.used(self._chunks[0])
        late = self._announce()
        while late and (first or number == len(self._chunks) - 1):
            self._deadline.check(lambda: f"refit: trainer rank {self._source.rank} did not finish packing in {{}}")
            late = self._announce()

    def publish_sums(self, sums: StreamingChecksums, packing: DeviceStream) -> None:
        values, first = sums.values(packing), _FIRST + self._spec.receivers
        for place, n in enumerate(self._items):
            if n in values:
                self._words.array[first + place] = values[n]
        self._words.array[_READY] += 1

    def finish(self) -> None:
        self._wait_taken(len(self._chunks) + 1)
        self._sent += len(self._chunks) + 1

    def drop(self, receivers: list[int], reason: str) -> None:
        self._dropped.update(receivers)

    def close(self) -> None:
        self._words.close()
        for file in (_words_file(self._spec, self._source.rank), _handles_file(self._spec, self._source.rank)):
            file.unlink(missing_ok=True)

    def _announce(self) -> int:
        """Move the ready counter over the chunks that the device has finished; return how many it has not."""
        words, packed = self._words.array, self._packed
        while words[_READY] < self._sent + len(packed) and packed[int(words[_READY]) - self._sent][1].reached():
            words[_READY] += 1
        return self._sent + len(packed) - int(words[_READY])

    def _wait_taken(self, count: int) -> None:
        """Wait until every receiver has taken the first `count` parts of this version."""
        taken = self._words.array[_FIRST : _FIRST + self._spec.receivers]

        def behind() -> list[int]:
            lacking = taken < self._sent + count
            ranks = range(1, self._spec.receivers + 1)
            return [rank for rank in ranks if lacking[rank - 1] and rank not in self._dropped]

        def message(late: list[int]) -> str:
            done = min(int(taken[rank - 1]) for rank in late) - self._sent
            names = [*map(self._source.plan.names, self._chunks), "checksums"]
            place = f"part {done + 1} of {len(names)} ({names[done]})"
            who = ", ".join(map(str, late))
            return f"refit: trainer rank {self._source.rank} waited {{}} for engine workers {who} to take {place}"

        while late := behind():
            self._announce()
            self._deadline.check(partial(message, late))


class IpcReceiver(ReceiverTransport):
    """An engine worker's side: maps the trainers' memory at the first refit, then copies chunk by chunk."""

    def __init__(self, spec: TransportSpec, plan: RefitPlan, rank: int, device: torch.device) -> None:
        self._spec, self._plan, self._rank, self._device = spec, plan, rank, device
        self.order = plan.taken_by(rank)
        self._streams = {owner: DeviceStream(device) for owner in plan.owners}
        self._owner_of = {n: chunk.owner for chunk in plan.chunks for n in chunk.numbers}
        self._owners: dict[int, _Mapped] = {}

    def begin(self, header: Header, sink: WeightSink, deadline: Deadline) -> None:
        self._header, self._deadline = header, deadline
        for stream in self._streams.values():
            stream.follow()

    def arrive(self, number: int, chunk: Chunk, meanwhile: Callable[[], object]) -> tuple[int, DeviceStream]:
        if chunk.owner not in self._owners:
            args = (self._spec, self._plan, chunk.owner, self._rank, self._device, self._deadline)
            self._owners[chunk.owner] = _Mapped(*args)
        message = lambda: late(self._plan, self._rank, chunk)  # noqa: E731
        self._owners[chunk.owner].await_ready(self._header, message, self._deadline, meanwhile)
        return self._owners[chunk.owner].slot(), self._streams[chunk.owner]

    def view(self, number: int, slot: int) -> Tensor | None:
        return self._owners[self._owner_of[number]].view(number, slot)

    def loaded(self, chunk: Chunk, end: DeviceEvent) -> None:
        self._owners[chunk.owner].begun += 1

    def give_back(self, chunk: Chunk) -> None:
        self._owners[chunk.owner].take()

    def sums(self, owner: int, header: Header) -> dict[int, int]:
        mapped = self._owners[owner]
        message = f"refit: engine worker {self._rank} waited {{}} for trainer rank {owner}'s checksums"
        mapped.await_ready(header, lambda: message, self._deadline, lambda: None)
        found = {n: mapped.sum(n) for n in self._plan.checked_of(owner, header)}
        mapped.begun += 1
        mapped.take()
        return found

    def times(self, loading: dict[int, float]) -> tuple[float, float]:
        # Loading crosses the link; the owners' links do so at the same time.
        return max(loading.values()), 0.0

    def close(self) -> None:
        for owner in self._owners.values():
            owner.words.close()
        self._owners = {}


class _Mapped:
    """One trainer rank's memory, as a receiver sees it."""

    def __init__(
        self, spec: TransportSpec, plan: RefitPlan, owner: int, rank: int, device: torch.device, deadline: Deadline
    ) -> None:
        file = _handles_file(spec, owner)
        while not file.exists():
            deadline.check(lambda: f"refit: engine worker {rank} waited {{}} for trainer rank {owner} to open")
        digest, shared, rings, self._offsets = pickle.loads(file.read_bytes())
        if digest != plan.digest:
            raise RefitError(f"trainer rank {owner} sends by plan {digest}, this end was given plan {plan.digest}")
        self._shared = {n: opened(handle, device) for n, handle in shared.items()}
        self._rings = [opened(handle, device) for handle in rings]
        self._word = {n: word for word, n in enumerate(n for _, chunk in plan.chunks_of(owner) for n in chunk.numbers)}
        self._parts = sum(1 for _ in plan.chunks_of(owner)) + 1
        self._plan, self._first, self._rank, self._owner = plan, _FIRST + spec.receivers, rank, owner
        self.words = SharedCounters(_words_file(spec, owner), self._first + len(self._word), create=False)
        # Parts of all versions that this receiver has begun to copy.
        self.begun = int(self.words.array[_FIRST + rank - 1])

    def slot(self) -> int:
        """Return the buffer through which the next part passes."""
        return self.begun % self._parts % max(1, len(self._rings))

    def view(self, number: int, slot: int) -> Tensor:
        """Return item `number` in the trainer's memory, shaped as its box."""
        if number in self._shared:
            tensor: Tensor = self._shared[number]
            return tensor
        shape = self._plan.items[number].box.shape
        return typed(self._rings[slot], self._offsets[number], self._plan.dtype(number), shape)

    def await_ready(
        self, header: Header, message: Callable[[], str], deadline: Deadline, meanwhile: Callable[[], object]
    ) -> None:
        """Wait until the owner's next part may be read; raise RefitError if it is of another version."""
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
        """Return the checksum of item `number` that the owner announced."""
        return int(self.words.array[self._first + self._word[number]])


def share(tensor: Tensor) -> Any:
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def opened(handle: tuple[Any, tuple[Any, ...]], device: torch.device) -> Tensor:
    """Return a shared tensor on this process's own device: the sender's index means nothing here."""
    rebuild, args = handle
    storage_device = 6
    tensor: Tensor = rebuild(*args[:storage_device], device.index or 0, *args[storage_device + 1 :])
    return tensor.detach()


def _words_file(spec: TransportSpec, owner: int) -> Path:
    return Path(spec.folder) / f"ipc-{owner}.words"


def _handles_file(spec: TransportSpec, owner: int) -> Path:
    return Path(spec.folder) / f"ipc-{owner}.handles"
