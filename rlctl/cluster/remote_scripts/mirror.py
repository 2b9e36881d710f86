"""Program on the head that prints the files of a run directory as they grow, until the reader is gone.

request: folder, files (names), have (name -> number of bytes that the reader has, and their SHA-256), follow. Each
output line is one piece of a file: {"file", "data" (base64), "first"}. first is true for the beginning of a file that
is new to the reader or was replaced. An empty line means that everything so far was printed.
"""

import base64
import hashlib
import json
import os
import sys
import time
from typing import Any

_CHUNK = 1 << 20
_MIRROR_POLL_S = 0.3


def run(request: "dict[str, Any]") -> None:
    """Print new pieces of the files until the reader is gone, see above."""
    parent = os.getppid()
    # Name of a file -> (inode, number of bytes that the reader has).
    places = {}
    for name, (size, digest) in request["have"].items():
        places[name] = place_of(os.path.join(request["folder"], name), size, digest)
    while os.getppid() == parent:
        for name in request["files"]:
            places[name] = print_growth(os.path.join(request["folder"], name), name, places.get(name, (0, 0)))
        sys.stdout.write("\n")
        sys.stdout.flush()
        if not request["follow"]:
            return
        time.sleep(_MIRROR_POLL_S)


def place_of(path: str, size: int, digest: str) -> "tuple[int, int]":
    """Return (inode, offset) from which to print for a reader that has `size` bytes.

    digest: SHA-256 of these bytes. If the file begins with other bytes, the inode is -1, which no file has, so that the
    file counts as replaced. Without a file it is 0.
    """
    try:
        with open(path, "rb") as file:
            is_same = hashlib.sha256(file.read(size)).hexdigest() == digest
            return (os.fstat(file.fileno()).st_ino, size) if is_same else (-1, 0)
    except FileNotFoundError:
        return 0, 0


def print_growth(path: str, name: str, place: "tuple[int, int]") -> "tuple[int, int]":
    """Print the bytes of the file after `place`, which is (inode, offset). Return the new place."""
    inode, offset = place
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            is_first = status.st_ino != inode or status.st_size < offset
            file.seek(0 if is_first else offset)
            offset = file.tell()
            # The file was replaced by an empty one, which has no piece: print an empty piece, to empty the reader's.
            if is_first and not status.st_size and inode:
                sys.stdout.write(json.dumps({"file": name, "data": "", "first": True}) + "\n")
            while chunk := file.read(_CHUNK):
                line = {"file": name, "data": base64.b64encode(chunk).decode(), "first": is_first}
                sys.stdout.write(json.dumps(line) + "\n")
                offset += len(chunk)
                is_first = False
            return status.st_ino, offset
    except FileNotFoundError:
        return place
