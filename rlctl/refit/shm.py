"""Refit through host shared memory: trainer ranks write flat files in /dev/shm, and every engine maps them.

This is the simplest transport, and the fastest on a CPU, where engines read the mapped files directly. Two slots
(files) are used in turn. So a version stays readable until the version after the next is written, for engines that are
rebuilt meanwhile. A reused slot also has its memory pages already: new pages of a tmpfs cost several times the copy.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlctl.refit.checksum import StreamingChecksums
from rlctl.refit.pipeline import ReceiverTransport, SenderTransport
from rlctl.refit.protocol import Header, RefitError, TransportSpec
from rlctl.refit.refit_plan import Chunk, RefitPlan
from rlctl.refit.shared_counters import Deadline, SharedCounters, digest_word
from rlctl.refit.weight_sink import WeightSink, view_entry
from rlctl.refit.weight_source import WeightSource
from rlctl.utils.device_stream import DeviceStream, Span

_SLOTS = 2


class ShmSender(SenderTransport):
    """A trainer rank's side: writes the rank's items. Rank 0 creates and removes the files."""

    buffers: "_Slots"

    def __init__(self, spec: TransportSpec, source: WeightSource) -> None:
        self._source = source
        self._folder = Path(spec.folder)
        plan = source.plan
        rank = source.rank
        if rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            _allocate(self._folder, plan.nbytes)
            SharedCounters(_words_file(self._folder), _word_count(plan), create=True).close()
        else:
            deadline = Deadline(spec.timeout_s)
            while not _words_file(self._folder).exists():
                deadline.check(lambda: f"refit: trainer rank {rank} waited {{}} for rank 0 to open")
        self.buffers = _Slots(self._folder, plan)
        # Index of this rank's word in a slot. A rank without chunks has no word, and never sends.
        self._word = 1 + plan.owners.index(rank) if rank in plan.owners else 0

    def begin(self, header: Header, deadline: Deadline) -> None:
        self._header = header
        self._words = self.buffers.words(header.version)
        # -1 says that this rank's part is being written.
        self._words[self._word] = -1

    def await_buffer(self, number: int, packing: DeviceStream) -> int:
        return self._header.version % _SLOTS

    def publish(self, number: int, slot: int, packed: Span) -> None:
        """Do nothing: a packed chunk is in the slot already."""

    def publish_sums(self, sums: StreamingChecksums, packing: DeviceStream) -> None:
        first_sum = 1 + len(self._source.plan.owners)
        for number, checksum in sums.values().items():
            self._words[first_sum + number] = checksum
        self._words[0] = digest_word(self._header.digest)
        # This word is written last. Version plus 1, so that version 0 differs from a slot never written.
        self._words[self._word] = self._header.version + 1

    def close(self) -> None:
        self.buffers.close()
        if self._source.rank == 0:
            for name in _slot_names():
                (self._folder / name).unlink(missing_ok=True)
            _words_file(self._folder).unlink(missing_ok=True)


class ShmReceiver(ReceiverTransport):
    """An engine worker's side: maps the slots at the first refit."""

    def __init__(self, spec: TransportSpec, plan: RefitPlan) -> None:
        self._plan = plan
        self._folder = Path(spec.folder)
        self.order = list(enumerate(plan.chunks))
        self._slots: _Slots | None = None
        self._stream = DeviceStream(torch.device("cpu"))

    def begin(self, header: Header, sink: WeightSink, deadline: Deadline) -> None:
        if self._slots is None:
            if not _words_file(self._folder).exists():
                raise RefitError(f"version {header.version} was never written to {self._folder}")
            self._slots = _Slots(self._folder, self._plan)
        self.finish(header)
        self._view = self._slots.view
        self._slot = header.version % _SLOTS
        self._has_adopted = sink.adopt(self._slots.flats[self._slot])

    def arrive(self, number: int, chunk: Chunk, meanwhile: Callable[[], object]) -> tuple[int, DeviceStream]:
        return self._slot, self._stream

    def view(self, number: int, slot: int) -> Tensor | None:
        return None if self._has_adopted else self._view(number, slot)

    def lasting_item(self, number: int, slot: int, sink: WeightSink) -> Tensor | None:
        # Checksums are computed on the host, whatever the sink's device.
        return self._view(number, slot) if self._has_adopted else None

    def sums(self, owner: int, header: Header) -> dict[int, int]:
        assert self._slots, "begin comes first"
        words = self._slots.words(header.version)
        first_sum = 1 + len(self._plan.owners)
        return {number: int(words[first_sum + number]) for number in self._plan.checked_items_of(owner, header)}

    def times(self, loading: dict[int, float]) -> tuple[float, float]:
        return 0.0, sum(loading.values())

    def finish(self, header: Header) -> None:
        """Raise RefitError unless the slot holds this version and plan completely. It may have been overwritten."""
        assert self._slots, "begin comes first"
        words = self._slots.words(header.version)
        if words[0] != digest_word(header.digest):
            raise RefitError(f"version {header.version} of plan {header.digest} was never written to {self._folder}")
        for word, owner in zip(words[1:], self._plan.owners):
            version = int(word) - 1
            if version != header.version:
                state = "is being written" if version < 0 else f"holds version {version}"
                raise RefitError(f"expected version {header.version}: the part of trainer rank {owner} {state}")

    def close(self) -> None:
        if self._slots:
            self._slots.close()


class _Slots:
    """Both mapped slots, and the words that describe their contents."""

    # `ChunkBuffers.nbytes`. It is 0, because no end has buffers besides the files.
    nbytes = 0

    def __init__(self, folder: Path, plan: RefitPlan) -> None:
        self._plan = plan
        # The slots, each uint8 [plan.nbytes].
        self.flats = [_map_file(folder / name, plan.nbytes) for name in _slot_names()]
        self._counters = SharedCounters(_words_file(folder), _word_count(plan), create=False)
        self._views: dict[tuple[int, int], Tensor] = {}

    def words(self, version: int) -> NDArray[np.int64]:
        """Return the words of the version's slot: the plan's digest, for each owner the version that it has written
        plus 1, then each item's checksum."""
        words: NDArray[np.int64] = self._counters.array.reshape(_SLOTS, -1)[version % _SLOTS]
        return words

    def has_items_of(self, chunk: Chunk) -> bool:
        """Return True: every item is written to the slot."""
        return True

    def view(self, number: int, slot: int) -> Tensor:
        """Return the memory of item `number` in a slot, with its dtype and shape."""
        if (number, slot) not in self._views:
            item = self._plan.items[number]
            tensor = view_entry(self.flats[slot], self._plan.entries[item.entry])
            self._views[number, slot] = tensor[item.box.slices()]
        return self._views[number, slot]

    def close(self) -> None:
        """Release the mapped memory."""
        self.flats = []
        self._views = {}
        self._counters.close()


def _slot_names() -> list[str]:
    return [f"slot{number}" for number in range(_SLOTS)]


def _words_file(folder: Path) -> Path:
    return folder / "words"


def _word_count(plan: RefitPlan) -> int:
    return _SLOTS * (1 + len(plan.owners) + len(plan.items))


def _allocate(folder: Path, size: int) -> None:
    """Create the slots' files and allocate their blocks, so that a full folder is an error here, not SIGBUS later."""
    files = [folder / name for name in _slot_names()]
    try:
        for file in files:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
    except OSError as error:
        for file in files:
            file.unlink(missing_ok=True)
        raise RefitError(f"{folder} has no room for {_SLOTS} x {size / 2**20:.0f} MiB: {error}") from error


def _map_file(path: Path, size: int) -> Tensor:
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
