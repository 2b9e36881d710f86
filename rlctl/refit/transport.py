"""The transport interface: how bytes get from trainer ranks to engine workers. One file an implementation.

Both ends live where the tensors are (a `Sender` in each trainer rank, a `Receiver` in each engine worker); the
driver only starts them and passes the header on. The loop never asks which transport it is.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rlctl.refit.broadcast import BroadcastGroup, BroadcastReceiver, BroadcastSender
from rlctl.refit.plan import Header, Plan, TransportSpec
from rlctl.refit.shm import ShmReceiver, ShmSender


class Sender(Protocol):
    """The trainer's end; called on every rank in lockstep, since `tensors` holds collectives."""

    def send(self, tensors: Iterator[tuple[str, Tensor]], header: Header) -> list[int]:
        """Send all tensors of the plan. Returns their checksums on rank 0 if the header asks for them."""

    def close(self) -> None:
        """Free buffers, files and groups."""


class Receiver(Protocol):
    """The engine worker's end."""

    def receive(self, header: Header) -> Iterator[tuple[str, Tensor]]:
        """All tensors in the plan's order; each is valid until the next is asked for. Raises RefitError."""

    def close(self) -> None:
        """Free buffers, files and groups."""


def open_sender(spec: TransportSpec, plan: Plan, rank: int, device: torch.device) -> Sender:
    """The trainer rank's end of the transport named by `spec`."""
    if spec.kind == "shm":
        return ShmSender(plan, Path(spec.folder), rank)
    return BroadcastSender(plan, BroadcastGroup(spec, 0, device) if rank == 0 else None)


def open_receiver(spec: TransportSpec, plan: Plan, rank: int, device: torch.device) -> Receiver:
    """The engine worker's end; `rank` counts all engine workers from 1."""
    if spec.kind == "shm":
        return ShmReceiver(plan, Path(spec.folder))
    return BroadcastReceiver(plan, BroadcastGroup(spec, rank, device))
