"""The schemes that rlctl's own refit is measured against, both ends: from plain to the best that is public.

- `raw`: large buffers and nothing else: what the link gives.
- `each`: one broadcast a tensor, loaded as it arrives.
- `packed`: tensors concatenated to chunks, broadcast, cut apart and loaded; with two chunks in turn on two streams it
  is the packed broadcast of NeMo-RL (after its public description: new memory for every chunk, boundaries found on
  each side). Its chunks are as large as rlctl's: at 2% of an H200's memory, as described there, it takes 116 ms for
  Qwen3-8B, and 59 so.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rlctl.refit.process_group import BroadcastGroup
from rlctl.utils.device_stream import DeviceStream, Span, elapsed

Scheme = Literal["raw", "each", "packed-1", "packed-2"]
LABELS: dict[Scheme, str] = {
    "raw": "raw link",
    "each": "one broadcast a tensor",
    "packed-1": "packed, one buffer",
    "packed-2": "packed, two buffers (NeMo-RL's)",
}
RAW_BYTES = 1 << 30

Named = Iterator[tuple[str, Tensor]]
Load = Callable[[list[tuple[str, Tensor]]], None]
Layout = list[tuple[str, torch.Size, torch.dtype]]


@dataclass
class Phases:
    """Device time by phase of one round."""

    spans: dict[str, list[Span]] = field(default_factory=dict)

    @contextmanager
    def of(self, name: str, stream: DeviceStream) -> Iterator[None]:
        """Count what is queued on `stream` within to phase `name`."""
        begin = stream.mark()
        yield
        self.spans.setdefault(name, []).append((begin, stream.mark()))

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase; the device must be done."""
        return {name: elapsed(spans) for name, spans in self.spans.items()}

    def counted(self, items: Named, name: str, stream: DeviceStream) -> Named:
        """Yield the items; count what making them queues on `stream` to phase `name`."""
        while True:
            with self.of(name, stream):
                item = next(items, None)
            if item is None:
                return
            yield item


@dataclass(frozen=True)
class Wire:
    """One end's means: the group (None on trainer ranks that only take part in gathering), chunk size, device."""

    group: BroadcastGroup | None
    buffer_bytes: int
    device: torch.device

    def broadcast(self, tensor: Tensor) -> None:
        """Send one tensor's bytes from trainer rank 0."""
        if self.group:
            self.group.broadcast([tensor.view(-1).view(torch.uint8)], "a bench tensor")


def send(scheme: Scheme, wire: Wire, tensors: Named, payload: int, scratch: Tensor | None) -> Phases:
    """Do a trainer rank's part of one round, until its device is done. scratch: of the raw scheme."""
    phases = Phases()
    if scheme == "raw":
        _raw(wire, payload, scratch, phases)
    elif scheme == "each":
        with DeviceStream(wire.device) as stream:
            for _, tensor in phases.counted(tensors, "gather", stream):
                with phases.of("wire", stream):
                    wire.broadcast(tensor)
        stream.wait()
    else:
        _send_packed(wire, tensors, phases, buffers=int(scheme[-1]))
    return phases


def receive(scheme: Scheme, wire: Wire, layout: Layout, load: Load, scratch: Tensor | None) -> Phases:
    """Do an engine worker's part of one round, until everything is loaded and its device is done."""
    phases = Phases()
    if scheme == "raw":
        _raw(wire, sum(_nbytes(shape, dtype) for _, shape, dtype in layout), scratch, phases)
    elif scheme == "each":
        with DeviceStream(wire.device) as stream:
            for name, shape, dtype in layout:
                tensor = torch.empty(shape, dtype=dtype, device=wire.device)
                with phases.of("wire", stream):
                    wire.broadcast(tensor)
                with phases.of("load", stream):
                    load([(name, tensor)])
        stream.wait()
    else:
        _receive_packed(wire, layout, load, phases, buffers=int(scheme[-1]))
    return phases


def _raw(wire: Wire, payload: int, scratch: Tensor | None, phases: Phases) -> None:
    assert scratch is not None
    with DeviceStream(wire.device) as stream, phases.of("wire", stream):
        for begin in range(0, payload, scratch.numel()):
            wire.broadcast(scratch[: min(scratch.numel(), payload - begin)])
    stream.wait()


def _send_packed(wire: Wire, tensors: Named, phases: Phases, buffers: int) -> None:
    streams = [DeviceStream(wire.device) for _ in range(buffers)]
    ended, turn = False, 0
    while not ended:
        stream = streams[turn % buffers]
        stream.wait()
        with stream:
            parts: list[Tensor] = []
            size = 0
            with phases.of("gather", stream):
                while size < wire.buffer_bytes:
                    item = next(tensors, None)
                    if item is None:
                        ended = True
                        break
                    parts.append(item[1].reshape(-1).view(torch.uint8))
                    size += parts[-1].numel()
            if parts and wire.group:
                with phases.of("pack", stream):
                    packed = torch.cat(parts)
                with phases.of("wire", stream):
                    wire.broadcast(packed)
        turn += 1
    for stream in streams:
        stream.wait()


def _receive_packed(wire: Wire, layout: Layout, load: Load, phases: Phases, buffers: int) -> None:
    streams = [DeviceStream(wire.device) for _ in range(buffers)]
    for turn, rows in enumerate(_chunks(layout, wire.buffer_bytes)):
        stream = streams[turn % buffers]
        stream.wait()
        with stream:
            sizes = [_nbytes(shape, dtype) for _, shape, dtype in rows]
            packed = torch.empty(sum(sizes), dtype=torch.uint8, device=wire.device)
            with phases.of("wire", stream):
                wire.broadcast(packed)
            with phases.of("load", stream):
                cut = zip(rows, torch.split(packed, sizes))
                load([(name, part.view(dtype).view(shape)) for (name, shape, dtype), part in cut])
    for stream in streams:
        stream.wait()


def _chunks(layout: Layout, limit: int) -> Iterator[Layout]:
    rows: Layout = []
    size = 0
    for row in layout:
        rows.append(row)
        size += _nbytes(row[1], row[2])
        if size >= limit:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _nbytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return shape.numel() * dtype.itemsize
