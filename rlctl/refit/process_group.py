"""A private process group of some trainer ranks and all engine workers: NCCL between GPUs, gloo on CPU."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from rlctl.refit.protocol import PeerLost, RefitError, TransportSpec
from rlctl.utils.ports import open_store
from rlctl.workers import changed_environment

# Timeout of NCCL's watchdog, which would end the process. It is long, so that rlctl's deadline comes first, whose error
# names the late member.
_NCCL_PATIENCE_S = 7 * 24 * 3600.0
# The most trainer ranks that a message lists.
_LISTED_RANKS = 4
# Key of the store for the reason why a refit cannot continue.
_LOST = "lost"
# Seconds between two reads of the store, by joining members and by a `LostWatch`.
_MEMBERS_S = 0.02
_PEERS_WATCH_S = 0.2


class BroadcastGroup:
    """Process group of trainer ranks, which take turns as senders (ranks from 0), and all engine workers (ranks after).

    Every member calls the same methods in the same order.
    """

    def __init__(self, store: Any, spec: TransportSpec, owners: Sequence[int], rank: int, device: torch.device) -> None:
        """Join the group. owners: trainer ranks in the group. rank: this member's rank in the group; for a trainer rank
        its index in `owners`. Raises PeerLost."""
        self.device = device
        self.owners = tuple(owners)
        # Trainer rank -> rank in the group.
        self._group_ranks = {owner: group_rank for group_rank, owner in enumerate(owners)}
        senders = name_ranks(owners)
        # Name of this member, for messages.
        if rank < len(owners):
            self._member = f"trainer rank {owners[rank]}"
        else:
            self._member = f"engine worker {rank - len(owners) + 1} and {senders}"
        # Acquired by the first call of `abort`, and never released.
        self._abort_lock = threading.Lock()
        world = len(owners) + spec.receivers
        try:
            self._group = _make_group(PrefixStore(f"owner-{owners[0]}", store), rank, world, spec.timeout_s, device)
            # The first broadcast creates the communicator. Do that now, while nobody waits for weights.
            self.broadcast(owners[0], [torch.zeros(1, dtype=torch.int64, device=device)], "a first word")
        except Exception as error:
            place = f"{spec.host}:{spec.port}"
            text = f"rank {rank} of {world} could not join the refit group of {senders} at {place}: {error}"
            raise PeerLost(text) from error

    def broadcast(self, owner: int, tensors: list[Tensor], contents: str) -> None:
        """Send contiguous tensors from trainer rank `owner` to all other members, like `exchange`."""
        self.exchange([(owner, tensor) for tensor in tensors], contents)

    def exchange(self, parts: Sequence[tuple[int, Tensor]], contents: str) -> None:
        """Send each contiguous tensor from its trainer rank to all other members. On CUDA this queues one kernel on the
        current stream.

        parts: (trainer rank, tensor to send or to receive into). contents: name of the tensors, for a message. Raises
        PeerLost.
        """
        group = self._group
        if group is None:
            raise PeerLost(f"refit: {self._member}: the group was ended before {contents}")
        try:
            if self.device.type == "cpu":
                for owner, tensor in parts:
                    group.broadcast([tensor], self._options_of(owner)).wait()
                return
            group._start_coalescing()
            for owner, tensor in parts:
                group.broadcast([tensor], self._options_of(owner))
            group._end_coalescing().wait()
        except RuntimeError as error:
            raise PeerLost(f"refit: {self._member}: the group broke at {contents}: {_brief(error)}") from error
        finally:
            # A stored exception keeps this frame alive. If the frame had a reference to the group, the group would stay
            # open, and other members would wait.
            del group

    def _options_of(self, owner: int) -> dist.BroadcastOptions:
        options = dist.BroadcastOptions()
        options.rootRank = self._group_ranks[owner]
        return options

    def abort(self) -> None:
        """End pending transfers on this rank. The group cannot be used afterwards. Any thread may call this.

        Aborting closes this rank's gloo connections, which ends the transfers of the other members too. If a member
        hangs, the transfers end after their timeout.
        """
        if self._abort_lock.acquire(blocking=False):
            group = self._group
            self._group = None
            group.abort()


def await_members(store: Any, spec: TransportSpec, members: int, error: type[RefitError]) -> None:
    """Wait until all members of all groups have reached the store, so that no join waits for a dead member.

    Raises `error` if `announce_loss` was called, or after the timeout of `spec`.
    """
    if store.add("here", 1) == members:
        store.set("all here", "")
    end = time.monotonic() + spec.timeout_s
    while not store.check(["all here"]):
        if store.check([_LOST]):
            raise error(store.get(_LOST).decode())
        if time.monotonic() > end:
            arrived = store.add("here", 0)
            raise error(f"refit: {arrived} of {members} met at {spec.host}:{spec.port} in {spec.timeout_s:g} s")
        time.sleep(_MEMBERS_S)


def announce_loss(store: Any, reason: str) -> None:
    """Write to the store that a member is lost, for all members to read."""
    store.set(_LOST, reason)


class LostWatch:
    """Thread that ends the transfers of an engine worker when a member of its groups is lost.

    Without this thread a worker would wait in a broadcast until the deadline, and its engine would not answer.
    """

    def __init__(self, spec: TransportSpec, end_transfers: Callable[[], None]) -> None:
        self._spec = spec
        self._end_transfers = end_transfers
        # Reason of the loss; empty if none is known.
        self._loss = ""
        self._is_closed = False
        self._running = threading.Event()
        threading.Thread(target=self._watch_store, name="refit-watch", daemon=True).start()

    def begin(self) -> None:
        """Begin to watch the store."""
        self._running.set()

    def end(self) -> None:
        """Stop watching. Raises PeerLost if a member was lost meanwhile."""
        self._running.clear()
        self.check()

    def check(self) -> None:
        """Raise PeerLost if a member was lost: received data is then invalid."""
        if self._loss:
            raise PeerLost(self._loss)

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._running.set()

    def _watch_store(self) -> None:
        # The store raises RuntimeError once the trainer that runs it is gone.
        with suppress(RuntimeError):
            # Use a separate client, because a call that the store does not answer blocks all users of its client.
            store = rendezvous(self._spec, False)
            while not self._is_closed:
                self._running.wait()
                if store.check([_LOST]):
                    self._loss = store.get(_LOST).decode()
                    self._end_transfers()
                    return
                time.sleep(_PEERS_WATCH_S)


def name_ranks(owners: Sequence[int]) -> str:
    """Return a text that names trainer ranks."""
    if len(owners) == 1:
        return f"trainer rank {owners[0]}"
    listed = ", ".join(map(str, owners[:_LISTED_RANKS]))
    if len(owners) > _LISTED_RANKS:
        listed += f" and {len(owners) - _LISTED_RANKS} more"
    return f"trainer ranks {listed}"


def rendezvous(spec: TransportSpec, server: bool) -> Any:
    """Return the store at which both ends meet. Raises RefitError with the store's address."""
    patience = timedelta(seconds=spec.timeout_s)
    try:
        return open_store(spec.host, spec.port, server=server, timeout=patience)
    except Exception as error:
        raise RefitError(f"refit: nobody could be met at {spec.host}:{spec.port}: {error}") from error


def _make_group(store: Any, rank: int, world: int, timeout_s: float, device: torch.device) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout_s))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_NCCL_PATIENCE_S)
    # High priority, so that transfers do not wait for packing kernels.
    options.is_high_priority_stream = True
    torch.cuda.set_device(device)
    with _report_errors():
        return dist.ProcessGroupNCCL(store, rank, world, options)


@contextmanager
def _report_errors() -> Iterator[None]:
    """Make NCCL groups created in this context report a dead peer as an error. By default NCCL's watchdogs would end
    this process.

    This also turns off the monitor that reads the store every second. If rank 0, which runs the store, is stopped,
    freeing the group would wait for the monitor's read without end (torch 2.11, `HeartbeatMonitor::join`).
    """
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    with changed_environment(dict.fromkeys(names, "0")):
        yield


def _brief(error: Exception) -> str:
    """Return the first sentence of an error, without the leading source location of gloo or NCCL."""
    return str(error).split("\n")[0].split(". ")[0].split("] ", 1)[-1]
