"""Refit by broadcast from trainer rank 0 to every engine worker: NCCL between GPUs, gloo on CPU.

A private process group (own store, own communicator) leaves the trainer's and the engine's groups alone. Every
collective has the group's timeout: a side that never comes is an error that names the rendezvous, not a hang.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from rlctl.refit.checksum import checksum
from rlctl.refit.plan import Header, Plan, RefitError, TransportSpec, planned


class BroadcastGroup:
    """Rank 0 is the trainer's first rank, ranks 1..n are the engines' workers."""

    def __init__(self, spec: TransportSpec, rank: int, device: torch.device) -> None:
        timeout = timedelta(seconds=spec.timeout_s)
        where = (spec.host, spec.port, spec.world)
        self.rank, self.device = rank, device
        try:
            self._store = TCPStore(*where, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
            self._group: Any = self._make(PrefixStore("rlctl-refit", self._store), rank, spec.world, timeout)
        except Exception as error:
            place = f"{spec.host}:{spec.port}"
            raise RefitError(f"refit rank {rank} of {spec.world} could not join at {place}: {error}") from error

    def _make(self, store: Any, rank: int, world: int, timeout: timedelta) -> Any:
        if self.device.type == "cpu":
            return dist.ProcessGroupGloo(store, rank, world, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, options)

    def broadcast(self, tensor: Tensor) -> None:
        """From rank 0 to all; the tensor is filled in place elsewhere."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([tensor], options).wait()
        except Exception as error:
            raise RefitError(f"refit rank {self.rank}: broadcast failed or timed out: {error}") from error


class BroadcastSender:
    """One broadcast a tensor, on rank 0; the other trainer ranks only take part in the export."""

    def __init__(self, plan: Plan, group: BroadcastGroup | None) -> None:
        self._plan, self._group = plan, group

    def send(self, tensors: Iterator[tuple[str, Tensor]], header: Header) -> list[int]:
        """See `Sender.send`."""
        sums: list[int] = []
        group = self._group
        if group is not None:
            group.broadcast(_words(header, group.device))
        for _, tensor in planned(self._plan, tensors):
            if group is None:
                continue
            if header.checksums:
                sums.append(checksum(tensor))
            group.broadcast(tensor.contiguous())
        return sums

    def close(self) -> None:
        self._group = None


class BroadcastReceiver:
    """Receives tensor by tensor into fresh memory on the worker's device."""

    def __init__(self, plan: Plan, group: BroadcastGroup) -> None:
        self._plan, self._group = plan, group

    def receive(self, header: Header) -> Iterator[tuple[str, Tensor]]:
        """See `Receiver.receive`."""
        self._plan.verify(header)
        expected = _words(header, self._group.device)
        words = torch.zeros_like(expected)
        self._group.broadcast(words)
        if not torch.equal(words, expected):
            raise RefitError(f"expected version {header.version} of plan {header.digest}, the trainer sends another")
        for entry in self._plan.entries:
            tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=self._group.device)
            self._group.broadcast(tensor)
            yield entry.name, tensor

    def close(self) -> None:
        del self._group


def _words(header: Header, device: torch.device) -> Tensor:
    return torch.tensor([header.version, int(header.digest[:15], 16)], dtype=torch.int64, device=device)
