"""Profiles of some updates: for each rank, a Chrome trace and a table of the most expensive operations."""

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
    """Updates to profile, counted from 1 at the start of the process, and the folder for the results."""

    folder: str
    first: int
    last: int


@dataclass(frozen=True)
class Cost:
    """The cost of one kind of operation."""

    name: str
    # Seconds on the device, without the operations that it calls.
    seconds: float
    # Share of all operations' seconds.
    share: float
    calls: int


@dataclass(frozen=True)
class Profiled:
    """The result of a profile."""

    updates: list[int]
    # Seconds.
    wall: float
    # Share of the wall time in which the device worked.
    busy: float
    # Most expensive first.
    costs: list[Cost]


class Profiler:
    """Counts the updates of a rank and profiles those of the spec; does nothing without a spec."""

    def __init__(self, spec: ProfileSpec | None, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._updates = 0
        self._start_time = 0.0
        self._profile: Any = None

    @contextmanager
    def update(self, ends: bool = True) -> Iterator[None]:
        """Surround an update, or one of its parts; the last part `ends` the update. Time between parts counts."""
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
        # Compressed here at level 1, because torch compresses at the highest level: minutes for a large model.
        with uncompressed_trace.open("rb") as source, gzip.open(draft, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target)
        uncompressed_trace.unlink()
        draft.replace(folder / f"trainer-{self._rank}.trace.json.gz")
        draft.write_text(json.dumps(asdict(costs), indent=1))
        draft.replace(folder / f"trainer-{self._rank}.json")


def _is_device_work(event: Any) -> bool:
    """Return true for work of the device, false for a label on a span of such work."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    return event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)


def covered_time(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length that the spans cover together: streams work at the same time."""
    covered = 0.0
    reached = float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _rank_operations(averages: Any, wall: float, busy: float, updates: list[int]) -> Profiled:
    """Rank operations by the time of a call's own kernels; without a device, by CPU time without its children."""
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
