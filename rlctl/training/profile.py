"""Profiles some updates of each rank: writes a Chrome trace and a table of the most expensive operations."""

import gzip
import json
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ROWS = 25


@dataclass(frozen=True)
class ProfileSpec:
    """Profile the updates `first` to `last`, counted from 1 at the start of the process."""

    # Folder for the results.
    folder: str
    first: int
    last: int


@dataclass(frozen=True)
class Cost:
    """Time that all calls of one operation took."""

    # Name of the operation in torch's profiler, for example aten::mm.
    name: str
    # Seconds of its own kernels on the device, or on a CPU; operations that it calls are not counted.
    seconds: float
    # Seconds of this operation / seconds of all operations.
    share: float
    # Number of calls.
    calls: int


@dataclass(frozen=True)
class Profiled:
    """Result of a profile of one rank, written as JSON."""

    # Numbers of the profiled updates, from 1.
    updates: list[int]
    # Wall time of the profile in seconds.
    wall: float
    # Share of the wall time in which the device worked.
    busy: float
    # The most expensive operations, in descending order.
    costs: list[Cost]


class Profiler:
    """Counts a rank's updates and profiles those that `spec` names. Without a spec it does nothing."""

    def __init__(self, spec: ProfileSpec | None, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._updates = 0
        self._start_time = 0.0
        self._profile: Any = None

    @contextmanager
    def update(self, ends: bool = True) -> Iterator[None]:
        """Return a context manager to put around an update or a part of an update. ends: True for the last part.

        The profile also covers the time between parts.
        """
        if self._spec and self._updates + 1 == self._spec.first and self._profile is None:
            self._begin_profile()
        yield
        self._updates += ends
        if self._spec and self._profile and self._updates >= self._spec.last:
            self._end_profile(self._spec)

    def _begin_profile(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        self._start_time = time.perf_counter()

    def _end_profile(self, spec: ProfileSpec) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall = time.perf_counter() - self._start_time
        profile = self._profile
        self._profile = None
        profile.stop()
        device_events = [event for event in profile.events() if _is_device_work(event)]
        busy = covered_time((event.time_range.start, event.time_range.end) for event in device_events)
        costs = _rank_operations(profile.key_averages(), wall, busy / 1e6, list(range(spec.first, spec.last + 1)))
        folder = Path(spec.folder)
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".partial-trainer-{self._rank}"
        uncompressed_trace = folder / f".partial-trainer-{self._rank}.json"
        profile.export_chrome_trace(str(uncompressed_trace))
        # Compress at level 1 here. torch would compress at the highest level, which takes minutes for a large model.
        with uncompressed_trace.open("rb") as source, gzip.open(draft, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target)
        uncompressed_trace.unlink()
        draft.replace(folder / f"trainer-{self._rank}.trace.json.gz")
        draft.write_text(json.dumps(asdict(costs), indent=1))
        draft.replace(folder / f"trainer-{self._rank}.json")


def _is_device_work(event: Any) -> bool:
    """Return True for an event that is work on the device, False for a label that spans several such events."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    return event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)


def covered_time(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans (start, end), which overlap if several streams work at the same time."""
    covered = 0.0
    reached = float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _rank_operations(averages: Any, wall: float, busy: float, updates: list[int]) -> Profiled:
    """Return the profile with the operations sorted by the device time of the kernels that they launch themselves.

    Without a device, operations are sorted by their CPU time, excluding operations that they call. wall, busy: seconds.
    """
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    operations = [event for event in averages if event.device_type == DeviceType.CPU]
    kernels = sum(event.self_device_time_total for event in averages if event.device_type == DeviceType.CUDA)
    field = "self_device_time_total" if kernels else "self_cpu_time_total"
    total = kernels or sum(event.self_cpu_time_total for event in operations)
    dearest = sorted(operations, key=lambda event: -getattr(event, field))[:_ROWS]
    costs = []
    for event in dearest:
        microseconds = getattr(event, field)
        costs.append(
            Cost(name=event.key, seconds=microseconds / 1e6, share=microseconds / max(total, 1), calls=event.count)
        )
    busy_seconds = busy if kernels else total / 1e6
    return Profiled(updates=updates, wall=wall, busy=busy_seconds / wall, costs=costs)
