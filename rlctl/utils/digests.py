"""Digests of files: a file is divided into pieces of 64 MiB; its digest is the SHA-256 of the pieces' SHA-256s.

So several cores or machines can digest one large file together. A writer can compute the digest while it writes.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

# Bytes of a piece, and of one read.
PIECE = 64 << 20
_READ = 4 << 20


class StreamDigest:
    """Digest of a stream of bytes, of which each `update` adds some."""

    def __init__(self) -> None:
        self._piece = hashlib.sha256()
        self._piece_rest = PIECE
        self._digests = list[bytes]()

    def update(self, unread: memoryview) -> None:
        """Add bytes to the end of the stream."""
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
        # The last piece is not full. Without any byte there is one piece, as for an empty file.
        last = [self._piece.digest()] if self._piece_rest < PIECE or not self._digests else []
        return join_pieces([*self._digests, *last])


def count_pieces(size: int) -> int:
    """Return the number of pieces of a file of `size` bytes; an empty file has one."""
    return max(1, -(-size // PIECE))


def piece_digest(path: Path, number: int, on_read: Callable[[memoryview], None] | None = None) -> bytes:
    """Return the SHA-256 of piece `number` of a file. on_read: called with the bytes of each read. Raises OSError."""
    digest = hashlib.sha256()
    buffer = bytearray(_READ)
    unread_bytes = PIECE
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        os.lseek(file.fileno(), number * PIECE, os.SEEK_SET)
        while unread_bytes and (count := file.readinto(view[: min(unread_bytes, _READ)])):
            digest.update(view[:count])
            if on_read:
                on_read(view[:count])
            unread_bytes -= count
    return digest.digest()


def join_pieces(pieces: Iterable[bytes]) -> str:
    """Return a file's digest, in hexadecimal, from the SHA-256s of its pieces in order."""
    return hashlib.sha256(b"".join(pieces)).hexdigest()
