"""Both ends of the reference schemes for rlctl's refit, from the plain link to the best public one.

- `raw`: large buffers and nothing else: the rate of the link.
- `each`: one broadcast a tensor, loaded as it arrives.
- `packed`: tensors concatenated to chunks, broadcast, cut apart and loaded. With two chunks in turn on two streams it
  is the packed broadcast of NeMo-RL (after its public description: new memory for every chunk, boundaries found on
  each side). Its chunks are as large as rlctl's: with chunks of 2% of an H200's memory, as described there, it takes
  116 ms for Qwen3-8B, and 59 ms with these.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
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
        """Count the block's work on `stream` to phase `name`."""
        begin = stream.mark()
        yield
        self.spans.setdefault(name, []).append((begin, stream.mark()))

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase; the device must be done."""
        return {name: elapsed(spans) for name, spans in self.spans.items()}


@dataclass
class Wire:
    """Means of one end."""

    group: BroadcastGroup | None  # None on trainer ranks that only take part in gathering
    buffer_bytes: int  # of a chunk
    device: torch.device
    scratch: Tensor | None = None  # the data of `raw`

    def broadcast(self, tensor: Tensor) -> None:
        """Send one tensor's bytes from trainer rank 0."""
        if self.group:
            self.group.broadcast(0, [tensor.view(-1).view(torch.uint8)], "a bench tensor")


def send(scheme: Scheme, wire: Wire, tensors: Named, payload: int) -> dict[str, float]:
    """Do a trainer rank's part of one round, until its device is done; return seconds by phase."""
    if scheme == "raw":
        return _raw(wire, payload)
    if scheme == "each":
        return _send_each(wire, tensors)
    phases, streams = Phases(), _streams(scheme, wire)
    for stream in cycle(streams):
        stream.wait()
        with stream:
            with phases.of("gather", stream):
                parts, size = [], 0
                for _, tensor in tensors:
                    parts.append(tensor.reshape(-1).view(torch.uint8))
                    size += parts[-1].numel()
                    if size >= wire.buffer_bytes:
                        break
            if not parts:
                break
            if wire.group:
                with phases.of("pack", stream):
                    packed = torch.cat(parts)
                with phases.of("wire", stream):
                    wire.broadcast(packed)
    return _finished(phases, streams)


def receive(scheme: Scheme, wire: Wire, layout: Layout, load: Load) -> dict[str, float]:
    """Do an engine worker's part of one round, until everything is loaded and its device is done."""
    if scheme == "raw":
        return _raw(wire, sum(_nbytes(shape, dtype) for _, shape, dtype in layout))
    if scheme == "each":
        return _receive_each(wire, layout, load)
    phases, streams = Phases(), _streams(scheme, wire)
    for stream, rows in zip(cycle(streams), _chunks(layout, wire.buffer_bytes)):
        stream.wait()
        with stream:
            sizes = [_nbytes(shape, dtype) for _, shape, dtype in rows]
            packed = torch.empty(sum(sizes), dtype=torch.uint8, device=wire.device)
            with phases.of("wire", stream):
                wire.broadcast(packed)
            with phases.of("load", stream):
                cut = zip(rows, torch.split(packed, sizes))
                load([(name, part.view(dtype).view(shape)) for (name, shape, dtype), part in cut])
    return _finished(phases, streams)


def _raw(wire: Wire, payload: int) -> dict[str, float]:
    if wire.group is None:
        return {}
    if wire.scratch is None:
        wire.scratch = torch.zeros(min(payload, RAW_BYTES), dtype=torch.uint8, device=wire.device)
    phases, stream = Phases(), DeviceStream(wire.device)
    with stream, phases.of("wire", stream):
        for begin in range(0, payload, RAW_BYTES):
            wire.broadcast(wire.scratch[: payload - begin])
    return _finished(phases, [stream])


def _send_each(wire: Wire, tensors: Named) -> dict[str, float]:
    """Send tensor by tensor, on one stream.

    The host limits this scheme: as packed chunks of one tensor it takes 230 ms instead of 193 (Qwen3-8B, two H200s).
    """
    phases, stream = Phases(), DeviceStream(wire.device)
    with stream:
        while True:
            with phases.of("gather", stream):
                row = next(tensors, None)
            if row is None:
                break
            with phases.of("wire", stream):
                wire.broadcast(row[1])
    return _finished(phases, [stream])


def _receive_each(wire: Wire, layout: Layout, load: Load) -> dict[str, float]:
    phases, stream = Phases(), DeviceStream(wire.device)
    with stream:
        for name, shape, dtype in layout:
            tensor = torch.empty(shape, dtype=dtype, device=wire.device)
            with phases.of("wire", stream):
                wire.broadcast(tensor)
            with phases.of("load", stream):
                load([(name, tensor)])
    return _finished(phases, [stream])


def _streams(scheme: Scheme, wire: Wire) -> list[DeviceStream]:
    return [DeviceStream(wire.device) for _ in range(2 if scheme == "packed-2" else 1)]


def _finished(phases: Phases, streams: list[DeviceStream]) -> dict[str, float]:
    for stream in streams:
        stream.wait()
    return phases.seconds()


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
