"""Runs on the head: prints files of a run directory as they grow, until whoever reads is gone.

request: folder, files (names), have (by name: bytes that the reader has, and their SHA-256), follow. A line each:
{"file", "data" (base64)}, with "anew" where the file begins: it is new to the reader, or was replaced. An empty line
says that all that stands was printed.
"""

import base64
import hashlib
import json
import os
import sys
import time
from typing import Any

_CHUNK = 1 << 20
_POLL_S = 0.3


def run(request: "dict[str, Any]") -> None:
    parent = os.getppid()
    places = {name: place_of(os.path.join(request["folder"], name), *has) for name, has in request["have"].items()}
    while os.getppid() == parent:
        for name in request["files"]:
            places[name] = say(os.path.join(request["folder"], name), name, places.get(name, (0, 0)))
        sys.stdout.write("\n")
        sys.stdout.flush()
        if not request["follow"]:
            return
        time.sleep(_POLL_S)


def place_of(path: str, size: int, digest: str) -> "tuple[int, int]":
    """Where to go on for a reader that has so many bytes: the file's beginning, as if it were replaced, if they are
    not those."""
    try:
        with open(path, "rb") as file:
            same = hashlib.sha256(file.read(size)).hexdigest() == digest
            return (os.fstat(file.fileno()).st_ino, size) if same else (-1, 0)
    except FileNotFoundError:
        return 0, 0


def say(path: str, name: str, place: "tuple[int, int]") -> "tuple[int, int]":
    """Prints what is new behind `place`, (inode, bytes printed); returns the place after it."""
    inode, offset = place
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            anew = found.st_ino != inode or found.st_size < offset
            file.seek(0 if anew else offset)
            offset = file.tell()
            if anew and not found.st_size and inode:
                sys.stdout.write(json.dumps({"file": name, "data": "", "anew": True}) + "\n")
            while data := file.read(_CHUNK):
                line = {"file": name, "data": base64.b64encode(data).decode(), "anew": anew}
                sys.stdout.write(json.dumps(line) + "\n")
                offset, anew = offset + len(data), False
            return found.st_ino, offset
    except FileNotFoundError:
        return place
