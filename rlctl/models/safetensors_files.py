"""Safetensors files with headers made before any tensor: processes write their own byte ranges side by side."""

import ctypes
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from rlctl.models.parameter_table import Layout, Shape

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True)
class FileLayout:
    """One file: its header, and the byte at which each tensor begins."""

    header: bytes
    # Tensor name -> (first byte in the file, whole shape).
    places: dict[str, tuple[int, Shape]]
    nbytes: int


def lay_out(tensors: Layout, metadata: Mapping[str, str]) -> FileLayout:
    """Return the layout of a file. Wider dtypes come first, so that every tensor is aligned."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    begin, places = 0, {}
    for name, shape, kind in sorted(tensors, key=lambda each: -_dtype(each[2]).itemsize):
        end = begin + math.prod(shape) * _dtype(kind).itemsize
        entries[name] = {"dtype": _CODES[_dtype(kind)], "shape": list(shape), "data_offsets": [begin, end]}
        places[name], begin = (begin, shape), end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(
        header, {name: (len(header) + at, shape) for name, (at, shape) in places.items()}, len(header) + begin
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the host; its own memory if it is contiguous."""
    flat = tensor.detach().contiguous()
    if not flat.numel():
        return memoryview(b"")
    # Not by numpy: torch then never resizes the tensor's memory again, and offloading could not free it.
    array = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())
    # The view holds the array, which holds the memory.
    array.tensor = flat  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def runs(shape: Shape, start: Shape, size: Shape) -> Iterator[tuple[int, int]]:
    """Yield (first number in the whole tensor, count) of each contiguous run of a box, in the box's own order."""
    inner = len(shape)
    while inner and size[inner - 1] == shape[inner - 1]:
        inner -= 1
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    count = math.prod(size[max(inner - 1, 0) :])
    for index in product(*(range(n) for n in size[: max(inner - 1, 0)])):
        yield sum((at + i) * step for at, i, step in zip(start, (*index, *(0,) * len(shape)), strides)), count


def write_box(descriptor: int, place: tuple[int, Shape], start: Shape, part: Tensor) -> int:
    """Write a box of a tensor at its place in a file; return the sum of its bytes. Raises OSError."""
    data, (begin, shape), width, done = bytes_of(part), place, part.element_size(), 0
    for first, count in runs(shape, start, tuple(part.shape)):
        write_at(descriptor, data[done : done + count * width], begin + first * width)
        done += count * width
    return sum_of(data)


def sum_of(data: memoryview) -> int:
    """Return the sum of some bytes."""
    return int(torch.frombuffer(data, dtype=torch.uint8).sum(dtype=torch.int64)) if data else 0


def write_at(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """Write all bytes at an offset. Raises OSError."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _dtype(kind: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, kind)
    return found
