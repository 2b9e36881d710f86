"""Digests of files in pieces: the SHA-256 of the SHA-256s of pieces of 64 MiB.

All cores, or several machines, work on one large file. A writer has the digest when its last byte is written.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

PIECE = 64 << 20
_READ = 4 << 20


class StreamDigest:
    """Digest of bytes that are given one after the other."""

    def __init__(self) -> None:
        self._piece = hashlib.sha256()
        self._piece_rest = PIECE
        self._digests = list[bytes]()

    def update(self, unread: memoryview) -> None:
        """Add some bytes."""
        while unread:
            part = unread[: self._piece_rest]
            self._piece.update(part)
            unread = unread[len(part) :]
            self._piece_rest = self._piece_rest - len(part)
            if not self._piece_rest:
                self._digests.append(self._piece.digest())
                self._piece = hashlib.sha256()
                self._piece_rest = PIECE

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""
        last = [self._piece.digest()] if self._piece_rest < PIECE or not self._digests else []
        return join_pieces([*self._digests, *last])


def count_pieces(size: int) -> int:
    """Return the number of pieces of a file of `size` bytes; an empty file has one."""
    return max(1, -(-size // PIECE))


def piece_digest(path: Path, number: int, look: Callable[[memoryview], None] | None = None) -> bytes:
    """Return the SHA-256 of one piece of a file. look: gets all bytes too. Raises OSError."""
    digest = hashlib.sha256()
    buffer = bytearray(_READ)
    unread_bytes = PIECE
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        os.lseek(file.fileno(), number * PIECE, os.SEEK_SET)
        while unread_bytes and (count := file.readinto(view[: min(unread_bytes, _READ)])):
            digest.update(view[:count])
            if look:
                look(view[:count])
            unread_bytes -= count
    return digest.digest()


def join_pieces(pieces: Iterable[bytes]) -> str:
    """Return a file's digest from those of its pieces, in order."""
    return hashlib.sha256(b"".join(pieces)).hexdigest()
