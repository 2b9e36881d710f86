"""Rounds of a measurement: all processes begin each round together, and each process records when its work ended.

Times are of `time.perf_counter`, which is the same clock in all processes of a host.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from rlctl.refit.process_group import BroadcastGroup, rendezvous
from rlctl.refit.protocol import TransportSpec
from rlctl.utils.device_stream import DeviceStream
from rlctl.utils.ports import LOOPBACK, open_store

_PATIENCE_S = 300.0
# Buffer of the plain link.
_PLAIN_BYTES = 1 << 30
# (phase -> its seconds in a round, seconds of the round's commit).
Timing = tuple[dict[str, float], float]


class Meeting:
    """A barrier for `parties` processes of one host."""

    def __init__(self, port: int, parties: int, server: bool) -> None:
        patience = timedelta(seconds=_PATIENCE_S)
        self._store: Any = open_store(LOOPBACK, port, server=server, timeout=patience)
        self._parties = parties
        self._count = 0

    def wait(self) -> None:
        """Wait until every process has called `wait` as often as this process."""
        self._count += 1
        name = f"{self._count}"
        if self._store.add(name, 1) == self._parties:
            self._store.set(f"{name}-all", "")
        self._store.wait([f"{name}-all"])


@dataclass
class Measured:
    """Record of one process. Each list has one entry for each round."""

    begins: list[float] = field(default_factory=list)  # time at which the round began
    ends: list[float] = field(default_factory=list)  # time at which this process ended the round
    commits: list[float] = field(default_factory=list)  # seconds of the commit
    phases: list[dict[str, float]] = field(default_factory=list)  # phase -> seconds
    extra_bytes: int = 0  # peak device memory minus that before the rounds
    growth_bytes: int = 0  # resident host memory at the end minus that after the first tenth of the rounds


class BenchEnd:
    """The part of one process in a bench: it joins the barrier and the plain link, and measures rounds."""

    def __init__(self, device: torch.device, meeting: Meeting) -> None:
        self.device = device
        self.meeting = meeting
        self._link: BroadcastGroup | None = None
        # Bytes of device memory that were allocated at the last `clear`.
        self._bytes_before = 0

    def clear(self) -> None:
        """Close the plain link. Later peaks of device memory count from the amount that is allocated now."""
        if self._link:
            self._link.abort()
        self._link = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._bytes_before = torch.cuda.memory_allocated(self.device)

    def plain_rounds(self, spec: TransportSpec, rank: int | None, payload: int, rounds: int) -> Measured:
        """Measure rounds that broadcast `payload` bytes in large buffers, and do nothing else.

        rank: rank in the link. Rank 0 sends, others receive. None: join the rounds, but not the link.
        """
        link = None if rank is None else BroadcastGroup(rendezvous(spec, rank == 0), spec, (0,), rank, self.device)
        self._link = link
        buffer = torch.zeros(min(payload, _PLAIN_BYTES), dtype=torch.uint8, device=self.device)

        def work(number: int) -> Timing:
            if link is not None:
                stream = DeviceStream(self.device)
                with stream:
                    # The last part may be shorter than the buffer.
                    for begin in range(0, payload, _PLAIN_BYTES):
                        link.broadcast(0, [buffer[: payload - begin]], "the plain link")
                stream.wait()
            return {}, 0.0

        return self.measure(rounds, work)

    def measure(self, count: int, work: Callable[[int], Timing], meeting: Meeting | None = None) -> Measured:
        """Run `work(round)` `count` times. Each round begins when all processes of the meeting have arrived.

        meeting: None means that of the bench.
        """
        measured = Measured()
        early_resident = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        for number in range(count):
            (meeting or self.meeting).wait()
            measured.begins.append(time.perf_counter())
            phases, commit = work(number)
            measured.ends.append(time.perf_counter())
            measured.phases.append(phases)
            measured.commits.append(commit)
            # By then the buffers of all rounds are allocated.
            if number == count // 10:
                early_resident = _resident_bytes()
        measured.growth_bytes = _resident_bytes() - early_resident
        if self.device.type == "cuda":
            measured.extra_bytes = torch.cuda.max_memory_allocated(self.device) - self._bytes_before
        return measured


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
