"""Rounds of a measurement: all processes begin one together, and each says when it ended on the host's own clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from rlctl.workers.ports import LOOPBACK, open_store

_PATIENCE_S = 300.0


class Meeting:
    """A place where `parties` processes of one host wait for each other."""

    def __init__(self, port: int, parties: int, keeper: bool) -> None:
        patience = timedelta(seconds=_PATIENCE_S)
        self._store: Any = open_store(LOOPBACK, port, keeper=keeper, timeout=patience)
        self._parties, self._count = parties, 0

    def wait(self) -> None:
        """Until everybody has called it as often."""
        self._count += 1
        name = f"{self._count}"
        if self._store.add(name, 1) == self._parties:
            self._store.set(f"{name}-all", "")
        self._store.wait([f"{name}-all"])


@dataclass
class Measured:
    """What one process saw: moments (time.perf_counter, one clock a host) of each round, seconds by phase, memory.

    committed: seconds of each round's commit. extra_bytes: device memory at the peak beyond what was held before.
    growth_bytes: resident host memory at the end beyond that after the first tenth of the rounds.
    """

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    extra_bytes: int = 0
    growth_bytes: int = 0


def run_rounds(
    meeting: Meeting,
    count: int,
    device: torch.device,
    before: int,
    work: Callable[[int], tuple[dict[str, float], float]],
) -> Measured:
    """work(round) returns seconds by phase, and of the commit. before: device memory held before anything was made."""
    measured = Measured()
    settled = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for number in range(count):
        meeting.wait()
        measured.begins.append(time.perf_counter())
        phases, commit = work(number)
        measured.ends.append(time.perf_counter())
        measured.phases.append(phases)
        measured.commits.append(commit)
        if number == count // 10:
            settled = _resident()
    measured.growth_bytes = _resident() - settled
    if device.type == "cuda":
        measured.extra_bytes = torch.cuda.max_memory_allocated(device) - before
    return measured


def _resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
