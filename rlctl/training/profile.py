"""Profiles of some updates: a Chrome trace and a table of the dearest operations for each rank."""

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
    # On the device, without the operations it calls.
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
    # Dearest first.
    costs: list[Cost]


class Profiler:
    """Counts the updates of a rank and profiles those of the spec; does nothing without a spec."""

    def __init__(self, spec: ProfileSpec | None, rank: int) -> None:
        self._spec, self._rank, self._updates, self._began = spec, rank, 0, 0.0
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
        self._began = time.perf_counter()

    def _end_profile(self, spec: ProfileSpec) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall = time.perf_counter() - self._began
        profile, self._profile = self._profile, None
        profile.stop()
        busy = covered_time((event.time_range.start, event.time_range.end) for event in profile.events() if _ran(event))
        found = _rank_operations(profile.key_averages(), wall, busy / 1e6, list(range(spec.first, spec.last + 1)))
        folder = Path(spec.folder)
        folder.mkdir(parents=True, exist_ok=True)
        trace, costs = (folder / f"trainer-{self._rank}{ending}" for ending in (".trace.json.gz", ".json"))
        partial, plain = (folder / f".partial-trainer-{self._rank}{ending}" for ending in ("", ".json"))
        profile.export_chrome_trace(str(plain))
        # Not by torch, which compresses as hard as it can: for minutes, if the model is large.
        with plain.open("rb") as source, gzip.open(partial, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target)
        plain.unlink()
        partial.replace(trace)
        partial.write_text(json.dumps(asdict(found), indent=1))
        partial.replace(costs)


def _ran(event: Any) -> bool:
    """Return true for work of the device, false for a label on a span of such work."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    return event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)


def covered_time(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length that the spans cover together: streams work at the same time."""
    covered, reached = 0.0, float("-inf")
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
    costs = [
        Cost(event.key, getattr(event, field) / 1e6, getattr(event, field) / max(total, 1), event.count)
        for event in dearest
    ]
    return Profiled(updates, wall, (busy if kernels else total / 1e6) / wall, costs)
