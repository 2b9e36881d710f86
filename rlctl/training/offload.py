"""Moves a trainer's state between its device and the host, to the place that the residency table has for each phase.

Each state has one page-locked host buffer, made at its first use and kept. Copies run on a separate stream: to the host
during the pass over log-probs, back to the device during the forward and backward pass.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor

from rlctl.preflight.backend import STATES, State
from rlctl.preflight.memory import PHASES, Phase, Place, Residency
from rlctl.utils.device_stream import DeviceStream, Span, total_seconds

# Bytes: each tensor begins at a multiple of this in the buffer, which suits copy engines and every dtype.
_ALIGNED = 512


class OffloadedTensors:
    """A fixed set of tensors that move together: all are on the device, on the host, or nowhere.

    Their storages move: the tensors remain the same objects, and are empty while they are away. No other tensor may
    share one of their storages. All methods must be called from one thread.
    """

    def __init__(self, tensors: Iterable[Tensor], frozen: bool = False) -> None:
        """tensors: on one device; views of one storage move as one. frozen: they never change, so that they are copied
        to the host once.
        """
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                storages[storage._cdata] = storage
        self._storages = list(storages.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        # Storage -> its first byte in the host buffer.
        self._starts: dict[int, int] = {}
        self._room = 0
        for key, size in zip(storages, self._sizes):
            self._starts[key] = self._room
            self._room += -(-size // _ALIGNED) * _ALIGNED
        self._device = self._storages[0].device if self._storages else torch.device("cpu")
        self._stream = DeviceStream(self._device)
        self._buffer: Tensor | None = None
        self._is_frozen = frozen
        # Copies whose duration `seconds` has not returned yet.
        self._copies: list[Span] = []
        self.place: Place = "device"

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(self._sizes)

    def move(self, place: Place) -> int:
        """Bring the tensors to `place`; return the bytes copied, 0 if they are there already.

        The call does not wait for the copies. After a move to the host, device memory is free as soon as its copy is
        done. After a move to the device, call `wait` before using the tensors. Tensors that were nowhere become zeros.
        """
        if place == self.place:
            return 0
        copied = 0
        if self.place != "device":
            copied += self._return_to_device()
        if place == "host" and not (self._is_frozen and self._buffer is not None):
            copied += self._copy_buffer(to_host=True)
        if place != "device":
            for storage in self._storages:
                storage.resize_(0)
        self.place = place
        return copied

    def wait(self) -> None:
        """Have work that is queued on the current stream from now on wait until the tensors are on the device."""
        self._stream.lead()

    def settle(self) -> None:
        """Wait until every copy is done. Only then may the host read or write a tensor from `at_hand`."""
        self._stream.wait()

    def take_seconds(self) -> float:
        """Return the seconds of the copies that ended since the last call."""
        # Copies end in their order.
        ended_copies = [span for span in self._copies if span[1].is_reached()]
        self._copies = self._copies[len(ended_copies) :]
        return total_seconds(ended_copies)

    def at_hand(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, or a view of its bytes in the host buffer if it is there. Nothing is copied."""
        start = self._starts.get(tensor.untyped_storage()._cdata)
        if self.place != "host" or start is None:
            return tensor
        assert self._buffer is not None
        first_number = start // tensor.element_size() + tensor.storage_offset()
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(self._buffer.untyped_storage(), first_number, tensor.shape, tensor.stride())

    def _return_to_device(self) -> int:
        for storage, size in zip(self._storages, self._sizes):
            storage.resize_(size)
        if self.place == "host":
            return self._copy_buffer(to_host=False)
        for storage in self._storages:
            _bytes(storage).zero_()
        return 0

    def _copy_buffer(self, *, to_host: bool) -> int:
        if self._buffer is None:
            self._buffer = torch.empty(self._room, dtype=torch.uint8)
            if self._device.type == "cuda":
                lock_pages(self._buffer, "offloaded state")
                weakref.finalize(self, unlock_pages, self._buffer, self._stream).atexit = False
        # After the work of the current stream, which computed the tensors, or used their memory until now.
        self._stream.follow()
        begin = self._stream.mark()
        with self._stream:
            for storage, start, size in zip(self._storages, self._starts.values(), self._sizes):
                device_bytes = _bytes(storage)
                host_bytes = self._buffer[start : start + size]
                if to_host:
                    host_bytes.copy_(device_bytes, non_blocking=True)
                else:
                    device_bytes.copy_(host_bytes, non_blocking=True)
                self._stream.keep(device_bytes)
        self._copies.append((begin, self._stream.mark()))
        return self.nbytes


class OffloadManager:
    """Moves a trainer's states by the residency table: `enter` a phase, and each state moves to that phase's place."""

    def __init__(self, table: Residency, states: Mapping[State, Iterable[Tensor]]) -> None:
        """states: the tensors that this backend moves, by kind; states without an entry remain as they are.

        Tensors in host memory (a CPU trainer's, or those that the host updates) never move.
        """
        self._table = table
        self._offloaded_sets: dict[State, OffloadedTensors] = {}
        for state in STATES:
            if state in states:
                self.add(state, states[state])
        # Bytes copied so far by phase, to the host and to the device.
        self.moved = {phase: {"to_host": 0, "to_device": 0} for phase in PHASES}
        # Totals at the last `take_metrics`.
        self._taken_totals = self.totals()

    def add(self, state: State, tensors: Iterable[Tensor]) -> None:
        """Add a state to move. Its tensors are on the device until the next `enter`."""
        self._offloaded_sets[state] = OffloadedTensors(select_movable(tensors))

    def enter(self, phase: Phase) -> None:
        """Start the moves of a phase, see `OffloadedTensors.move`; do nothing if the last phase wanted the same."""
        for state, offloaded in self._offloaded_sets.items():
            place = self._table[phase][state]
            self.moved[phase]["to_device" if place == "device" else "to_host"] += offloaded.move(place)

    def wait(self) -> None:
        """Call `OffloadedTensors.wait` of every set, before the first use of tensors that may have moved back."""
        for offloaded in self._offloaded_sets.values():
            offloaded.wait()

    def settle(self) -> None:
        """Call `OffloadedTensors.settle` of every set."""
        for offloaded in self._offloaded_sets.values():
            offloaded.settle()

    def at_hand(self, tensor: Tensor) -> Tensor:
        """Return `OffloadedTensors.at_hand` of any tensor. Call `settle` first."""
        for offloaded in self._offloaded_sets.values():
            tensor = offloaded.at_hand(tensor)
        return tensor

    def totals(self) -> dict[str, float]:
        """Return moved_to_host and moved_to_device, for `TrainerRank.memory`."""
        totals = {}
        for way in ("to_host", "to_device"):
            totals[f"moved_{way}"] = float(sum(phase_bytes[way] for phase_bytes in self.moved.values()))
        return totals

    def take_metrics(self) -> dict[str, float]:
        """Take offload/to_host_gb, offload/to_device_gb and offload/seconds since the last call.

        Empty if no byte moved. The seconds are the copies' durations; a step loses less time if it computes meanwhile.
        """
        totals_before = self._taken_totals
        self._taken_totals = self.totals()
        metrics = {}
        for name, size in self._taken_totals.items():
            metrics[f"offload/{name.removeprefix('moved_')}_gb"] = (size - totals_before[name]) / 1e9
        if not any(metrics.values()):
            return {}
        metrics["offload/seconds"] = sum(offloaded.take_seconds() for offloaded in self._offloaded_sets.values())
        return metrics


def process_memory(device: torch.device) -> dict[str, float]:
    """Return bytes now and at peak: device_allocated, device_peak, host_rss."""
    cuda = device.type == "cuda"
    return {
        "device_allocated": float(torch.cuda.memory_allocated()) if cuda else 0.0,
        "device_peak": float(torch.cuda.max_memory_allocated()) if cuda else 0.0,
        "host_rss": float(psutil.Process().memory_info().rss),
    }


def select_movable(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that are on a GPU."""
    return [tensor for tensor in tensors if tensor.device.type != "cpu"]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def lock_pages(buffer: Tensor, purpose: str) -> None:
    """Page-lock the buffer as it is: torch's own pinned memory comes in powers of two, up to twice as large.

    Raises RuntimeError where the system refuses to lock this much.
    """
    code = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)  # type: ignore[no-untyped-call]
    if int(code):
        gib = buffer.numel() / 2**30
        raise RuntimeError(f"{gib:.1f} GiB of host memory for {purpose} could not be locked (CUDA error {code})")


def unlock_pages(buffer: Tensor, stream: DeviceStream) -> None:
    """Unlock the buffer's pages once the copies on `stream` are done."""
    stream.wait()
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[no-untyped-call]


class FrozenWeights:
    """Weights of a role that is not trained. They are on the host, and replace the policy's while they are needed."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        """weights: this rank's part, by name, in the compute dtype (forward passes round to that dtype anyway)."""
        self._weights = {name: _copy_to_host(tensor) for name, tensor in weights.items()}

    @contextmanager
    def in_place_of(self, live: dict[str, Tensor]) -> Iterator[None]:
        """Within the block, copy these weights into `live`; afterwards restore the weights of `live`, bit for bit."""
        live_copies = {name: _copy_to_host(tensor) for name, tensor in live.items()}
        try:
            for name, tensor in live.items():
                tensor.copy_(self._weights[name], non_blocking=True)
            yield
        finally:
            for name, tensor in live.items():
                tensor.copy_(live_copies[name], non_blocking=True)


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, page-locked where a GPU will read it."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
    return copy.copy_(tensor)
