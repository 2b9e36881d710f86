"""A trainer rank's end of the refit, whatever trains behind it: says what it holds, then sends it when asked."""

from dataclasses import dataclass

import torch

from rlctl.refit.plan import RefitPlan, TensorSlice
from rlctl.refit.protocol import Header, TransportSpec
from rlctl.refit.source import Sharded, WeightSource
from rlctl.refit.transport import Report, Sender, open_sender


@dataclass(frozen=True)
class Holding:
    """What a rank can send: the whole tensors' layout, its own boxes of them, and its device's memory in bytes."""

    layout: list[tuple[str, tuple[int, ...], str]]
    boxes: list[TensorSlice]
    device_bytes: int


class SendingEnd:
    """Hosted by a trainer rank."""

    def __init__(self, sharded: Sharded, rank: int, device: torch.device) -> None:
        self._sharded, self._rank, self._device = sharded, rank, device
        self._sender: Sender | None = None

    def holding(self, dtype: str) -> Holding:
        """What the plan is made of; `dtype` is what every tensor travels as."""
        boxes = [shard.box for shard in self._sharded.shards()]
        return Holding(self._sharded.layout(dtype), boxes, _memory(self._device))

    def open(self, spec: TransportSpec, plan: RefitPlan) -> None:
        """Join the transport."""
        self.close()
        self._source = WeightSource(plan, self._rank, self._sharded.shards())
        self._sender = open_sender(spec, self._source, self._device)

    def send(self, header: Header) -> Report:
        """Send this rank's part of a version; the weights do not change meanwhile, being this thread's to change.

        Raises RefitError if the trainer moved its weights to other memory since `open`.
        """
        if self._sender is None:
            raise RuntimeError("refit_open comes before refit_send")
        report = self._sender.send(header)
        # Afterwards: looking costs milliseconds that receivers would wait, and an error ends the run either way.
        self._source.verify_in_place(self._sharded.shards())
        return report

    def drop(self, receivers: list[int], reason: str) -> None:
        """See `Sender.drop`."""
        if self._sender:
            self._sender.drop(receivers, reason)

    def close(self) -> None:
        """Leave the transport."""
        if self._sender:
            self._sender.close()
        self._sender = None


class SendsWeights:
    """What a hosted trainer rank offers the driver's `Refit`, whoever trains: its `SendingEnd`, call by call."""

    _sending: SendingEnd

    def refit_holding(self, dtype: str) -> Holding:
        """See `SendingEnd.holding`."""
        return self._sending.holding(dtype)

    def refit_open(self, spec: TransportSpec, plan: RefitPlan) -> None:
        """See `SendingEnd.open`."""
        self._sending.open(spec, plan)

    def refit_send(self, header: Header) -> Report:
        """See `SendingEnd.send`."""
        return self._sending.send(header)

    def rest(self) -> None:
        """Give the device's memory to engines that share it; only called where they do."""
        raise NotImplementedError

    def refit_drop(self, receivers: list[int], reason: str) -> None:
        """See `SendingEnd.drop`; called beside a running `refit_send`."""
        self._sending.drop(receivers, reason)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    import psutil

    return int(psutil.virtual_memory().total)
