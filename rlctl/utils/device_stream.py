"""Lanes of device work that run beside each other, and the marks by which one hands over to the next.

On CUDA a lane is a stream and a mark an event; on CPU work is done when it is called, and a mark is a moment.
"""

import time
from typing import Any

import torch


class DeviceEvent:
    """A moment of a lane: reached once everything queued there before it is done."""

    def __init__(self, event: Any) -> None:
        self.event, self._time = event, time.perf_counter()

    def reached(self) -> bool:
        """Whether the device has come this far."""
        return self.event is None or bool(self.event.query())

    def lead(self) -> None:
        """The thread's current stream queues behind it."""
        if self.event is not None:
            self.event.wait()

    def seconds_since(self, earlier: "DeviceEvent") -> float:
        """Between two marks that both are reached."""
        if self.event is None:
            return self._time - earlier._time
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class DeviceStream:
    """`with lane:` queues device work on it."""

    def __init__(self, device: torch.device, urgent: bool = False) -> None:
        """urgent: its kernels are started before those of other lanes."""
        cuda = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-int(urgent)) if cuda else None  # type: ignore[no-untyped-call]
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
        """Queue behind everything on the thread's current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def lead(self) -> None:
        """The thread's current stream queues behind everything here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def keep(self, tensor: torch.Tensor) -> None:
        """The tensor's memory, once freed, is nobody else's until what is queued here so far is done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def after(self, mark: DeviceEvent | None) -> None:
        """Queue behind another lane's mark."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark.event)

    def wait(self) -> None:
        """Until the device has done everything queued here."""
        if self._stream is not None:
            self._stream.synchronize()

    def mark(self) -> DeviceEvent:
        """This moment of the lane."""
        if self._stream is None:
            return DeviceEvent(None)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)  # type: ignore[no-untyped-call]
        return DeviceEvent(event)


Span = tuple[DeviceEvent, DeviceEvent]


def elapsed(spans: list[Span]) -> float:
    """Seconds between the marks of each pair, summed."""
    return sum(end.seconds_since(begin) for begin, end in spans)
