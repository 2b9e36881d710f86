"""A private process group of one trainer rank and all engine workers: NCCL between GPUs, gloo on CPU."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from rlctl.refit.protocol import PeerLost, RefitError, TransportSpec
from rlctl.utils.ports import open_store
from rlctl.workers import changed_environment

# NCCL's own watchdog is never to be first: rlctl's deadline names who is late, the watchdog ends the process.
_NCCL_PATIENCE_S = 7 * 24 * 3600.0


class BroadcastGroup:
    """One owner (rank 0) and all engine workers (ranks from 1)."""

    def __init__(self, store: Any, spec: TransportSpec, owner: int, rank: int, device: torch.device) -> None:
        self.device = device
        self._who = f"refit: engine worker {rank} and trainer rank {owner}" if rank else f"refit: trainer rank {owner}"
        self._aborted = threading.Lock()
        world = 1 + spec.receivers
        try:
            self._group = _make(PrefixStore(f"owner-{owner}", store), rank, world, spec.timeout_s, device)
            # The communicator is made by the first collective: now, while nobody waits for weights.
            self.broadcast([torch.zeros(1, dtype=torch.int64, device=device)], "a first word")
        except Exception as error:
            place = f"{spec.host}:{spec.port}"
            text = f"rank {rank} of {world} could not join trainer rank {owner}'s refit group at {place}: {error}"
            raise RefitError(text) from error

    def broadcast(self, tensors: list[Tensor], what: str) -> None:
        """Send contiguous tensors from rank 0 into the others' memory; on CUDA queued on the current stream.

        Raises PeerLost, whose message names the transfer.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            if self.device.type == "cpu":
                for tensor in tensors:
                    self._group.broadcast([tensor], options).wait()
                return
            self._group._start_coalescing()
            for tensor in tensors:
                self._group.broadcast([tensor], options)
            self._group._end_coalescing().wait()
        except RuntimeError as error:
            raise PeerLost(f"{self._who}: the group broke at {what}: {_brief(error)}") from error

    def abort(self) -> None:
        """End pending transfers on this rank; the group is of no use afterwards. gloo ends after its timeout."""
        if self.device.type == "cuda" and self._aborted.acquire(blocking=False):
            self._group.abort()


def rendezvous(spec: TransportSpec, server: bool) -> Any:
    """Return the store where both ends meet. Raises RefitError that names the place."""
    patience = timedelta(seconds=spec.timeout_s)
    try:
        return open_store(spec.host, spec.port, server=server, timeout=patience)
    except Exception as error:
        raise RefitError(f"refit: nobody could be met at {spec.host}:{spec.port}: {error}") from error


def _make(store: Any, rank: int, world: int, timeout_s: float, device: torch.device) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout_s))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_NCCL_PATIENCE_S)
    # The wire must not wait for packing kernels to leave the multiprocessors.
    options.is_high_priority_stream = True
    torch.cuda.set_device(device)
    with _errors_stay_here():
        return dist.ProcessGroupNCCL(store, rank, world, options)


@contextmanager
def _errors_stay_here() -> Iterator[None]:
    """Have a group made in this context report a dead peer as an error; by default its watchdogs end this process.

    Nor does the group ask the store every second whether others failed. The store is in rank 0: a question that a
    stopped rank 0 never answers is waited for when the group is freed (torch 2.11, `HeartbeatMonitor::join`).
    """
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    with changed_environment(dict.fromkeys(names, "0")):
        yield


def _brief(error: Exception) -> str:
    """Return the first sentence of an error, without the place in gloo's or NCCL's source that it begins with."""
    return str(error).split("\n")[0].split(". ")[0].split("] ", 1)[-1]
