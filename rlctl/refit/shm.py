"""Refit through host shared memory: trainer ranks write flat files in /dev/shm, every engine maps them.

The simplest correct transport, and the fast one on CPU, where the mapping is the only copy. Two slots take turns
and are reused for ever: a version stays readable until the next but one is written, so that an engine started anew
can be brought to it, and writing goes into pages that exist (fresh ones of a tmpfs cost several times the copy).
"""

import mmap
import os
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlctl.refit.checksum import StreamingChecksums
from rlctl.refit.plan import RefitPlan
from rlctl.refit.protocol import Header, RefitError, TransportSpec
from rlctl.refit.shared_counters import Deadline, SharedCounters, digest_word
from rlctl.refit.sink import WeightSink, whole
from rlctl.refit.source import WeightSource

_SLOTS = 2


class ShmSender:
    """A trainer rank's end: writes its own items; rank 0 makes the files and removes them."""

    def __init__(self, spec: TransportSpec, source: WeightSource) -> None:
        self._source, self._folder = source, Path(spec.folder)
        if source.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            _allocate(self._folder, source.plan.nbytes)
            SharedCounters(_words_file(self._folder), _word_count(source.plan), create=True).close()
        else:
            deadline = Deadline(spec.timeout_s)
            while not _words_file(self._folder).exists():
                deadline.check(lambda: f"refit: trainer rank {source.rank} waited {{}} for rank 0 to open")
        self._slots = _Slots(self._folder, source.plan)
        self._items = [n for _, chunk in source.plan.of(source.rank) for n in chunk.numbers]
        self._sums = StreamingChecksums(torch.device("cpu"))

    def send(self, header: Header) -> dict[str, float]:
        """See `Sender.send`."""
        begin = time.perf_counter()
        plan, rank, slots = self._source.plan, self._source.rank, self._slots
        checked = plan.checked(header)
        slots.unwrite(header.version, rank)
        self._sums.start(len(checked))
        view = partial(slots.view, header.version)
        for n in self._items:
            view(n).copy_(self._source.view(n))
            # As it stands in the slot, converted once; and while it stands in a cache.
            if n in checked:
                self._sums.here([n], view, slots.number(header.version))
        self._sums.end()
        for n, value in self._sums.values().items():
            slots.set_sum(header.version, n, value)
        slots.written(header, rank)
        seconds = time.perf_counter() - begin
        size = sum(plan.items[n].nbytes for n in self._items)
        return {"pack": seconds, "wire": 0.0, "seconds": seconds, "bytes": size, "extra_bytes": 0}

    def drop(self, receivers: list[int], reason: str) -> None:
        """See `Sender.drop`. Nobody waits for a receiver here."""

    def close(self) -> None:
        """See `Sender.close`."""
        self._slots.close()
        self._sums.close()
        if self._source.rank == 0:
            for file in (*map(self._folder.joinpath, _names()), _words_file(self._folder)):
                file.unlink(missing_ok=True)


class ShmReceiver:
    """An engine worker's end: maps the slots at the first refit."""

    def __init__(self, plan: RefitPlan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._slots: _Slots | None = None
        self._sums = StreamingChecksums(torch.device("cpu"))

    def receive(self, header: Header, sink: WeightSink) -> dict[str, float]:
        """See `Receiver.receive`."""
        begin = time.perf_counter()
        self._plan.verify(header)
        if self._slots is None:
            if not _words_file(self._folder).exists():
                raise RefitError(f"version {header.version} was never written to {self._folder}")
            self._slots = _Slots(self._folder, self._plan)
        slots = self._slots
        slots.verify(header)
        checked = self._plan.checked(header)
        self._sums.start(len(checked))
        self._sums.here(checked, partial(slots.view, header.version), slots.number(header.version))
        self._sums.end()
        for n, value in self._sums.values().items():
            if value != slots.sum(header.version, n):
                item = self._plan.items[n]
                raise RefitError(f"{item.box.name} arrived changed (version {header.version})")
        if not sink.adopt(slots.flat(header.version)):
            sink.copies((n, slots.view(header.version, n)) for n in range(len(self._plan.items))).run()
        # A slot that was written again meanwhile holds a mixture.
        slots.verify(header)
        seconds = time.perf_counter() - begin
        return {"wire": 0.0, "load": seconds, "seconds": seconds, "bytes": self._plan.payload, "extra_bytes": 0}

    def close(self) -> None:
        """See `Receiver.close`."""
        if self._slots:
            self._slots.close()
        self._sums.close()


class _Slots:
    """Both slots, mapped, and the words that say what stands in them: digest, written versions, checksums."""

    def __init__(self, folder: Path, plan: RefitPlan) -> None:
        self._plan, self._folder = plan, folder
        self._flats = [_map(folder / name, plan.nbytes) for name in _names()]
        self._words = SharedCounters(_words_file(folder), _word_count(plan), create=False)
        self._stride = _word_count(plan) // _SLOTS
        self._owner_words = 1 + len(plan.owners)
        self._views: dict[tuple[int, int], Tensor] = {}

    def flat(self, version: int) -> Tensor:
        """The slot of a version, uint8 [plan.nbytes]."""
        return self._flats[self.number(version)]

    def number(self, version: int) -> int:
        """Of its slot."""
        return version % _SLOTS

    def view(self, version: int, number: int) -> Tensor:
        """Item `number`'s place there, found once."""
        key = (self.number(version), number)
        if key not in self._views:
            item = self._plan.items[number]
            self._views[key] = whole(self.flat(version), self._plan.entries[item.entry])[item.box.slices()]
        return self._views[key]

    def unwrite(self, version: int, owner: int) -> None:
        """Say that the owner's part is being written."""
        if owner in self._plan.owners:
            self._words.array[self._place(version, 1 + self._plan.owners.index(owner))] = -1

    def written(self, header: Header, owner: int) -> None:
        """Say that the owner's part stands, with its checksums. The last word to be written."""
        self._words.array[self._place(header.version, 0)] = digest_word(header.digest)
        if owner in self._plan.owners:
            place = self._place(header.version, 1 + self._plan.owners.index(owner))
            # Version 0 must differ from a slot that nobody wrote.
            self._words.array[place] = header.version + 1

    def verify(self, header: Header) -> None:
        """Raise RefitError unless the slot holds this version of this plan, whole."""
        words = self._words.array
        if words[self._place(header.version, 0)] != digest_word(header.digest):
            raise RefitError(f"version {header.version} of plan {header.digest} was never written to {self._folder}")
        for index, owner in enumerate(self._plan.owners, 1):
            found = int(words[self._place(header.version, index)]) - 1
            if found != header.version:
                state = "is being written" if found < 0 else f"holds version {found}"
                raise RefitError(f"expected version {header.version}: the part of trainer rank {owner} {state}")

    def set_sum(self, version: int, number: int, value: int) -> None:
        self._words.array[self._place(version, self._owner_words + number)] = value

    def sum(self, version: int, number: int) -> int:
        return int(self._words.array[self._place(version, self._owner_words + number)])

    def close(self) -> None:
        self._flats, self._views = [], {}
        self._words.close()

    def _place(self, version: int, index: int) -> int:
        return self.number(version) * self._stride + index


def _names() -> list[str]:
    return [f"slot{number}" for number in range(_SLOTS)]


def _words_file(folder: Path) -> Path:
    return folder / "words"


def _word_count(plan: RefitPlan) -> int:
    return _SLOTS * (1 + len(plan.owners) + len(plan.items))


def _allocate(folder: Path, size: int) -> None:
    """The slots' files, their blocks claimed first: a full folder is an error, not SIGBUS."""
    files = [folder / name for name in _names()]
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


def _map(path: Path, size: int) -> Tensor:
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
