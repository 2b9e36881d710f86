"""Refit through host shared memory: rank 0 writes one flat file in /dev/shm, every engine maps it.

The simplest correct transport, and the fast one on CPU, where the mapping is the only copy. A version's file
appears by rename, complete or not at all, and stays until the next version stands, so that an engine started
anew can be brought to the current version at any time.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rlctl.refit.checksum import checksum
from rlctl.refit.plan import Entry, Header, Plan, RefitError, planned


class ShmSender:
    """Writes `folder/vN`; removes the version before the last."""

    def __init__(self, plan: Plan, folder: Path, rank: int) -> None:
        self._plan, self._folder, self._rank = plan, folder, rank
        self._written: list[Path] = []
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)

    def send(self, tensors: Iterator[tuple[str, Tensor]], header: Header) -> list[int]:
        """See `Sender.send`. Raises RefitError when /dev/shm is too small or a tensor departs from the plan."""
        if self._rank != 0:
            for _ in tensors:
                pass
            return []
        path = version_file(self._folder, header.version)
        sums = self._write(path, tensors, header.checksums)
        for old in self._written:
            if old != path:
                old.unlink(missing_ok=True)
        self._written = [path]
        return sums

    def close(self) -> None:
        for file in self._written:
            file.unlink(missing_ok=True)

    def _write(self, path: Path, tensors: Iterator[tuple[str, Tensor]], checksums: bool) -> list[int]:
        partial = path.with_suffix(".partial")
        sums: list[int] = []
        with _mapped(partial, self._plan.nbytes) as buffer:
            flat = torch.frombuffer(buffer, dtype=torch.uint8)
            for entry, tensor in planned(self._plan, tensors):
                place(flat, entry).copy_(tensor)
                if checksums:
                    sums.append(checksum(tensor))
            del flat
        os.replace(partial, path)
        return sums


class ShmReceiver:
    """Maps the version's file; tensors are views of it."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder = plan, folder

    def receive(self, header: Header) -> Iterator[tuple[str, Tensor]]:
        """See `Receiver.receive`."""
        self._plan.verify(header)
        path = version_file(self._folder, header.version)
        if not path.exists():
            raise RefitError(f"version {header.version} was never written to {self._folder}")
        flat = torch.from_file(str(path), shared=True, size=self._plan.nbytes, dtype=torch.uint8)
        for entry in self._plan.entries:
            yield entry.name, place(flat, entry)

    def close(self) -> None:
        """Nothing is held between refits."""


def version_file(folder: Path, version: int) -> Path:
    """Where a version's bytes lie."""
    return folder / f"v{version}"


def place(flat: Tensor, entry: Entry) -> Tensor:
    """The entry's own slice of a flat uint8 buffer, viewed with its dtype and shape."""
    part = flat[entry.offset : entry.offset + entry.nbytes]
    return part.view(getattr(torch, entry.dtype)).view(entry.shape)


class _mapped:
    """A new file of a size, mapped for writing, gone again if the block raises.

    Blocks are claimed first: a full folder is an error, not SIGBUS.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size

    def __enter__(self) -> mmap.mmap:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._size)
            self._map = mmap.mmap(descriptor, self._size)
        except OSError as error:
            self._path.unlink(missing_ok=True)
            raise RefitError(f"{self._path.parent} has no room for {self._size / 2**20:.0f} MiB: {error}") from error
        finally:
            os.close(descriptor)
        return self._map

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._map.close()
        if kind is not None:
            self._path.unlink(missing_ok=True)
