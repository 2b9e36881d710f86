"""CUDA streams and events. On a CPU the same classes do nothing, because there all work is done when it is called."""

import time
from typing import Any

import torch


class DeviceEvent:
    """A point in a stream. The device reaches the point when everything queued before it is done."""

    def __init__(self, event: Any) -> None:
        """Wrap a CUDA event; None on a CPU."""
        self.event = event
        self._time = time.perf_counter()

    def is_reached(self) -> bool:
        """Return True if the device has reached the point."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Wait until the device has reached the point."""
        if self.event is not None:
            self.event.synchronize()

    def lead(self) -> None:
        """Make later work on the thread's current stream wait for this point."""
        if self.event is not None:
            self.event.wait()

    def seconds_since(self, earlier: "DeviceEvent") -> float:
        """Return the seconds between an earlier point and this one. The device must have reached both."""
        if self.event is None:
            return self._time - earlier._time
        return float(earlier.event.elapsed_time(self.event)) / 1e3


def mark_here(device: torch.device) -> DeviceEvent:
    """Return the current point of the thread's current stream."""
    if device.type != "cuda":
        return DeviceEvent(None)
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))  # type: ignore[no-untyped-call]
    return DeviceEvent(event)


class DeviceStream:
    """A CUDA stream. Device work within `with stream:` is queued on this stream."""

    def __init__(self, device: torch.device, urgent: bool = False) -> None:
        """Make a stream. urgent: its waiting kernels start before those of other streams."""
        cuda = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-int(urgent)) if cuda else None  # type: ignore[no-untyped-call]
        # Contexts of the `with` blocks that are open, which may be nested.
        self._entered: list[Any] = []

    def __enter__(self) -> "DeviceStream":
        if self._stream is not None:
            self._entered.append(torch.cuda.stream(self._stream))
            self._entered[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._entered.pop().__exit__(*error)

    def follow(self) -> None:
        """Make later work on this stream wait for everything queued on the thread's current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def lead(self) -> None:
        """Make later work on the thread's current stream wait for everything queued on this stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the allocator from reusing a tensor's memory until the work queued here so far is done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def follow_mark(self, mark: DeviceEvent | None) -> None:
        """Make later work on this stream wait for a point of another stream."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark.event)

    def wait(self) -> None:
        """Wait until the device has done everything queued on this stream."""
        if self._stream is not None:
            self._stream.synchronize()

    def mark(self) -> DeviceEvent:
        """Return the current point of the stream."""
        if self._stream is None:
            return DeviceEvent(None)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)  # type: ignore[no-untyped-call]
        return DeviceEvent(event)


# Begin and end of some device work.
Span = tuple[DeviceEvent, DeviceEvent]


def total_seconds(spans: list[Span]) -> float:
    """Return the sum of the durations of all spans, in seconds."""
    return sum(end.seconds_since(begin) for begin, end in spans)
