"""The transport interface: how bytes get from trainer ranks to engine workers. One file an implementation.

Both ends live where the tensors are (a `Sender` in each trainer rank, a `Receiver` in each engine worker); the
driver only starts them and passes the header on. The loop never asks which transport it is.
"""

from pathlib import Path
from typing import Protocol

import torch

from rlctl.refit.plan import RefitPlan
from rlctl.refit.protocol import Header, TransportSpec
from rlctl.refit.sink import WeightSink
from rlctl.refit.source import WeightSource

# Seconds by phase of one end, and "bytes" and "extra_bytes" (memory it holds for refits).
Report = dict[str, float]


class Sender(Protocol):
    """A trainer rank's end."""

    def send(self, header: Header) -> Report:
        """Send this rank's chunks; returns when the weights may change again.

        Report: pack (iterating, converting, packing), wire, seconds, bytes, extra_bytes. Raises RefitError naming
        the receiver and tensor at fault once the deadline passed, or the reason given to `drop`.
        """

    def drop(self, receivers: list[int], reason: str) -> None:
        """Wait no longer for these receivers (ranks from 1), in the `send` under way; called from another thread.

        A transport that cannot go on without them ends the `send` with a RefitError of that reason.
        """

    def close(self) -> None:
        """Free buffers, files and groups."""


class Receiver(Protocol):
    """The engine worker's end."""

    def receive(self, header: Header, sink: WeightSink) -> Report:
        """Put every item of the plan into `sink`, whole and checked when it returns (device work included).

        Report: wire, load, seconds, bytes, extra_bytes. Raises RefitError: another version or plan than announced,
        a checksum that differs (names the tensor), a sender that did not come in time (names its rank and tensor).
        """

    def close(self) -> None:
        """Free buffers, files and groups."""


def receiver_bytes(spec: TransportSpec, plan: RefitPlan) -> int:
    """Device memory for buffers that an engine worker's end comes to hold at most."""
    if spec.kind != "broadcast":
        return 0
    from rlctl.refit.broadcast import receiver_bytes

    return receiver_bytes(spec, plan)


def open_sender(spec: TransportSpec, source: WeightSource, device: torch.device) -> Sender:
    """The trainer rank's end of the transport named by `spec`."""
    if spec.kind == "shm":
        from rlctl.refit.shm import ShmSender

        return ShmSender(spec, source)
    if spec.kind == "ipc":
        from rlctl.refit.ipc import IpcSender

        return IpcSender(spec, source, device)
    from rlctl.refit.broadcast import BroadcastSender

    return BroadcastSender(spec, source, device)


def open_receiver(spec: TransportSpec, plan: RefitPlan, rank: int, device: torch.device) -> Receiver:
    """The engine worker's end; `rank` counts all engine workers from 1."""
    if spec.kind == "shm":
        from rlctl.refit.shm import ShmReceiver

        return ShmReceiver(plan, Path(spec.folder))
    if spec.kind == "ipc":
        from rlctl.refit.ipc import IpcReceiver

        return IpcReceiver(spec, plan, rank, device)
    from rlctl.refit.broadcast import BroadcastReceiver

    return BroadcastReceiver(spec, plan, rank, device)
