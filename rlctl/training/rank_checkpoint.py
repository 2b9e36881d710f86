"""One rank's part of a checkpoint: copied to host memory, then written by a thread while the next step trains.

No rank waits for another: each writes one file of its state, and its byte ranges of the Hugging Face folder. Digests
are computed where the bytes are. The driver asks every rank for its part (`trainer_save.py`).
"""

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import psutil
import torch
from torch import Tensor

from rlctl.models.hf_folder import Companions, FolderWriter, WeightFiles, folder_files
from rlctl.models.parameter_table import Layout, ParameterTable
from rlctl.models.safetensors_files import FileLayout, bytes_of, lay_out, sum_of
from rlctl.training.offload import lock_pages, unlock_pages
from rlctl.utils.device_stream import DeviceStream
from rlctl.utils.digests import StreamDigest, count_pieces, piece_digest

R = TypeVar("R")
# Bytes: each copy begins at a multiple of this.
_ALIGNED = 512
# Share of the free host memory that copies may take.
_MOST_OF_FREE = 0.8
# Bytes, at least, whose pages are locked at a time: a step's own calls of CUDA wait no longer than for these.
_LOCKED = 256 << 20


@dataclass(frozen=True)
class TensorShard:
    """The part `tensor` of a whole tensor of `shape`, from `start` on."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: Tensor

    @classmethod
    def from_whole(cls, tensor: Tensor) -> "TensorShard":
        """Return all of a tensor as its shard."""
        return cls(tuple(tensor.shape), (0,) * tensor.ndim, tensor)


Shards = Mapping[str, TensorShard]
Copies = Literal["nothing", "state", "state and export"]


@dataclass(frozen=True)
class SaveBegun:
    """A rank's answer to `RankSave.begin`: training may go on, or has to wait."""

    # Bytes that this rank writes, its export left out.
    nbytes: int
    # Reason why the state was not copied, so that it must not change before it is written; empty if it was.
    wait_cause: str


@dataclass(frozen=True)
class FilesWritten:
    """Files of one rank that are on the disk."""

    # Path -> (bytes, digest), of files that this rank wrote alone.
    files: dict[str, tuple[int, str]]
    # Sum of the bytes that it wrote into the weights of the export.
    export_sum: int
    # Seconds that writing took.
    seconds: float


@dataclass(frozen=True)
class PiecesRead:
    """A rank's share of the pieces of the export's weights, as they are on the disk."""

    # Path -> number of the piece -> its SHA-256.
    pieces: dict[str, dict[int, bytes]]
    # Sum of their bytes.
    read_sum: int


class StateCopies:
    """Host copies of a rank's state in one buffer, made once and kept; page-locked for a GPU's state.

    The memory is taken by a thread while steps run: 3.6 GB stopped training for 13.8 s on a busy machine.
    """

    def __init__(self, device: torch.device, ranks_here: int) -> None:
        """ranks_here: ranks that share the host's memory, at most."""
        self._device = device
        self._ranks_here = ranks_here
        # Sizes of the tensors that the buffer has a place for.
        self._sizes: list[int] = []
        self._buffer: Future[Tensor] | None = None
        # Each unlocks a part of the buffer, and keeps that part alive until then.
        self._unlocks: list[Callable[[], object]] = []

    def prepare(self, sizes: Sequence[int]) -> None:
        """Begin to take the memory for tensors of these bytes, in their order. Earlier memory is free again."""
        self._unlock_parts()
        # Earlier memory is given up before the thread asks for the free memory.
        self._buffer = None
        self._sizes = list(sizes)
        self._buffer = _start_thread(lambda: self._make_buffer(sizes))

    def take(self, shards: Mapping[int, TensorShard]) -> dict[int, TensorShard]:
        """Return copies, under the same keys. Raises RuntimeError where the host's memory is too small."""
        sizes = [shard.tensor.nbytes for shard in shards.values()]
        if self._buffer is None or self._buffer.exception() or sizes != self._sizes:
            self.prepare(sizes)
        assert self._buffer
        buffer = self._buffer.result()
        copies = {}
        begin = 0
        for key, shard in shards.items():
            tensor = shard.tensor.detach()
            copy = buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[key] = replace(shard, tensor=copy.copy_(tensor, non_blocking=True))
            begin += _align_size(tensor.nbytes)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copies

    def _make_buffer(self, sizes: Sequence[int]) -> Tensor:
        """Return memory that is there, not only promised. Raises RuntimeError if the host has too little."""
        buffer_size = sum(map(_align_size, sizes))
        free = psutil.virtual_memory().available
        size_of_all_ranks = buffer_size * self._ranks_here
        if size_of_all_ranks > _MOST_OF_FREE * free:
            raise RuntimeError(
                f"copies of the state take {size_of_all_ranks / 2**30:.1f} GiB of host memory, "
                f"of which {free / 2**30:.1f} GiB are free"
            )
        buffer = torch.empty(buffer_size, dtype=torch.uint8)
        refusal = ""
        try:
            for begin, end in locked_parts(sizes):
                self._take_part(buffer[begin:end])
        except RuntimeError as error:
            refusal = str(error)
        if refusal:
            # A later save asks again. The future would keep the first error, whose frames keep the memory: raise a new
            # one.
            self._unlock_parts()
            del buffer
            raise RuntimeError(refusal)
        return buffer

    def _take_part(self, part: Tensor) -> None:
        part.zero_()
        if self._device.type == "cuda":
            lock_pages(part, "copies of checkpoints")
            unlock = weakref.finalize(self, unlock_pages, part, DeviceStream(self._device))
            self._unlocks.append(unlock)
            unlock.atexit = False

    def _unlock_parts(self) -> None:
        for unlock in self._unlocks:
            unlock()
        self._unlocks = []


def _align_size(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def locked_parts(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each part that is locked at a time. No tensor is in two: no copy may cross parts."""
    begin = end = 0
    for size in sizes:
        end += _align_size(size)
        if end - begin >= _LOCKED:
            yield begin, end
            begin = end
    if end > begin:
        yield begin, end


def shards_by_id(state: Shards, weights: Shards) -> dict[int, TensorShard]:
    """Return the shards of both by their identity: most weights are in both, and each is copied once."""
    return {id(shard): shard for shard in chain(state.values(), weights.values())}


class ExportJob(Protocol):
    """One rank's part of a folder that is a checkpoint's export."""

    @property
    def folder(self) -> Path: ...

    def write(self) -> int:
        """Write this rank's part; return the sum of its bytes in `folder_files`. Raises OSError."""


@dataclass(frozen=True)
class WeightsJob:
    """One rank's part of a Hugging Face folder that ranks write together."""

    folder: Path
    # The other files, which rank 0 writes; None on other ranks.
    companions: Companions | None
    # Files of the trained model, open, for tensors without a parameter; None where there are none.
    source: WeightFiles | None
    layout: Layout
    table: ParameterTable
    # Weights that this rank writes, by their names in memory.
    weights: Shards
    rank: int
    world: int

    def write(self) -> int:
        """Write this rank's boxes, and rank 0's other files; return the sum of the bytes of weights."""
        with FolderWriter(self.folder, self.layout) as writer:
            if self.companions:
                writer.write_headers()
                self.companions.write(self.folder, self.layout[0][2])
            for name, shard in self.weights.items():
                for row in self.table.rows_of(name):
                    if part := row.part(shard.tensor, shard.start):
                        start, view = part
                        writer.write(row.name, start, view)
            if self.source:
                for row in self.table.kept_rows[self.rank :: self.world]:
                    writer.write(row.name, (0,) * len(row.shape), self.source.tensor(row.name))
            return writer.sync()


class RankSave:
    """The save of one rank: begun between two steps, written by a thread, asked about from any thread."""

    def __init__(self, rank: int, world: int, device: torch.device, copies: Copies) -> None:
        """copies: parts of which a copy is expected."""
        self._rank = rank
        self._world = world
        self._expected = copies
        ranks_here = min(world, torch.cuda.device_count()) if device.type == "cuda" else world
        self._copies = StateCopies(device, ranks_here)
        self._written: Future[FilesWritten] | None = None
        self._pieces: Future[PiecesRead] | None = None
        self._export: Path | None = None

    @property
    def needs_preparing(self) -> bool:
        """True if copies are expected and `prepare` was not called yet."""
        return self._expected != "nothing"

    def prepare(self, state: Shards, weights: Shards) -> None:
        """Begin to take the memory that copies of the state, and of an export's weights, will need."""
        shards = shards_by_id(state, weights if self._expected == "state and export" else {})
        self._copies.prepare([shard.tensor.nbytes for shard in shards.values()])
        self._expected = "nothing"

    def begin(
        self,
        folder: Path,
        state: Shards,
        updates: int,
        weights: Shards,
        export: Callable[[Shards], ExportJob] | None,
        copied: bool,
    ) -> SaveBegun:
        """Write this rank's file, and its part of the export, on a thread from now on.

        The RNG state is the one of this moment. weights: those of the export. copied: copy `state` and `weights` first.
        Waits for the end of the save before.
        """
        self.settle()
        wait_cause = ""
        if copied:
            try:
                copies = self._copies.take(shards_by_id(state, weights))
                state = {name: copies[id(shard)] for name, shard in state.items()}
                weights = {name: copies[id(shard)] for name, shard in weights.items()}
            except RuntimeError as error:
                wait_cause = str(error)
        shards = {**state, f"rng.{self._rank}": TensorShard.from_whole(torch.get_rng_state())}
        if self._rank == 0:
            shards["updates"] = TensorShard.from_whole(torch.tensor(updates))
        job = export(weights) if export else None
        self._export = job.folder if job else None
        self._pieces = None
        self._written = _start_thread(lambda: self._write_files(folder, shards, job))
        return SaveBegun(sum(shard.tensor.nbytes for shard in shards.values()), wait_cause)

    def settle(self) -> None:
        """Wait until no thread writes, however it ended."""
        if self._written:
            self._written.exception()

    def wait_for_files(self, wait_s: float | None) -> FilesWritten | None:
        """Return the files once they are on the disk, None if they are not after `wait_s` seconds. Raises OSError."""
        assert self._written
        return _result_within(self._written, wait_s)

    def wait_for_pieces(self, wait_s: float | None) -> PiecesRead | None:
        """Read this rank's share of the export's pieces from the first call on; return the digests.

        Every rank must have written by then. Raises OSError.
        """
        if self._pieces is None:
            self._pieces = _start_thread(self._read_pieces)
        return _result_within(self._pieces, wait_s)

    def _write_files(self, folder: Path, shards: Shards, export: ExportJob | None) -> FilesWritten:
        begin = time.perf_counter()
        file = folder / f"shard-{self._rank + 1:05}-model-00001-of-00001.safetensors"
        folder.mkdir(parents=True, exist_ok=True)
        size_and_digest = _write_shards(file, shards)
        export_sum = export.write() if export else 0
        return FilesWritten(
            files={str(file): size_and_digest}, export_sum=export_sum, seconds=time.perf_counter() - begin
        )

    def _read_pieces(self) -> PiecesRead:
        assert self._export
        digests = dict[str, dict[int, bytes]]()
        read_sum = 0

        def add_to_sum(piece: memoryview) -> None:
            nonlocal read_sum
            read_sum += sum_of(piece)

        pieces = []
        for file in folder_files(self._export):
            pieces += [(file, number) for number in range(count_pieces(file.stat().st_size))]
        for file, number in pieces[self._rank :: self._world]:
            digests.setdefault(str(file), {})[number] = piece_digest(file, number, add_to_sum)
        return PiecesRead(digests, read_sum)


def lay_out_shards(shards: Shards) -> FileLayout:
    """Return the layout of a file of shards. torch's reader finds the begin of each in the header."""
    tensors = []
    for name, shard in shards.items():
        tensors.append((name, tuple(shard.tensor.shape), str(shard.tensor.dtype).removeprefix("torch.")))
    starts = {name: {"saved_offsets": list(shard.start)} for name, shard in shards.items()}
    return lay_out(tensors, {"DCP_SHARDING_INFO": json.dumps(starts), "DCP_VERSION": "1.0", "format": "pt"})


def _write_shards(file: Path, shards: Shards) -> tuple[int, str]:
    """Write one rank's state; return its bytes and digest. Raises OSError with the file's name."""
    layout = lay_out_shards(shards)
    digest = StreamDigest()
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            # One tensor at a time leaves the device.
            tensors = (bytes_of(shards[name].tensor.cpu()) for name in layout.places)
            for unwritten in chain((memoryview(layout.header),), tensors):
                digest.update(unwritten)
                while unwritten:
                    unwritten = unwritten[os.write(descriptor, unwritten) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error
    return layout.nbytes, digest.hexdigest()


def _start_thread(work: Callable[[], R]) -> "Future[R]":
    """Start `work` on a thread that does not keep the process alive; return the future of its result."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _result_within(future: "Future[R]", wait_s: float | None) -> R | None:
    try:
        return future.result(wait_s)
    except NotYet:
        # The work may have ended just now, or raised a TimeoutError itself, as a network's disk does.
        return future.result() if future.done() else None
