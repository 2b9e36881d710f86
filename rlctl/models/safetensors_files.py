"""Writing of safetensors files whose headers are computed first, so that several processes write their byte ranges."""

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
    """Header of one file, and the byte at which each tensor begins."""

    header: bytes
    # Tensor name -> (first byte in the file, whole shape).
    places: dict[str, tuple[int, Shape]]
    nbytes: int


def lay_out(tensors: Layout, metadata: Mapping[str, str]) -> FileLayout:
    """Return the layout of a file. Tensors with wider dtypes come first, so that every tensor is aligned."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    # Tensor name -> (first byte, counted from the end of the header, whole shape).
    relative_places: dict[str, tuple[int, Shape]] = {}
    begin = 0
    for name, shape, kind in sorted(tensors, key=lambda tensor: -_torch_dtype(tensor[2]).itemsize):
        dtype = _torch_dtype(kind)
        end = begin + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        relative_places[name] = (begin, shape)
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Spaces after the JSON align the first tensor to 8 bytes.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = {name: (len(header) + offset, shape) for name, (offset, shape) in relative_places.items()}
    return FileLayout(header, places, nbytes=len(header) + begin)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a host tensor, without a copy if it is contiguous."""
    flat = tensor.detach().contiguous()
    if not flat.numel():
        return memoryview(b"")
    # Not by `Tensor.numpy`: after that call torch never resizes the tensor's storage, so offloading could not free it.
    array = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())
    # The memoryview references the array, and the array references the tensor's memory.
    array.tensor = flat  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def contiguous_runs(shape: Shape, start: Shape, size: Shape) -> Iterator[tuple[int, int]]:
    """Yield (first element in the whole tensor, number of elements) of each contiguous run of a box, in order."""
    # In dimensions from `inner` on, the box has the tensor's full size. A run covers these dimensions and the one
    # before.
    inner = len(shape)
    while inner and size[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    first = sum(begin * stride for begin, stride in zip(start, strides))
    count = math.prod(size[outer:])
    for index in product(*map(range, size[:outer])):
        yield first + sum(position * stride for position, stride in zip(index, strides)), count


def write_box(descriptor: int, place: tuple[int, Shape], start: Shape, part: Tensor) -> int:
    """Write a box of a tensor into a file, and return the sum of its byte values. Raises OSError."""
    begin, shape = place
    content = bytes_of(part)
    width = part.element_size()
    written = 0
    for first, count in contiguous_runs(shape, start, tuple(part.shape)):
        write_at(descriptor, content[written : written + count * width], begin + first * width)
        written += count * width
    return sum_bytes(content)


def sum_bytes(content: memoryview) -> int:
    """Return the sum of the byte values."""
    return int(torch.frombuffer(content, dtype=torch.uint8).sum(dtype=torch.int64)) if content else 0


def write_at(descriptor: int, content: memoryview | bytes, offset: int) -> None:
    """Write all of `content` at `offset`. Raises OSError."""
    rest = memoryview(content)
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest = rest[count:]
        offset += count


def _torch_dtype(kind: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, kind)
    return dtype
