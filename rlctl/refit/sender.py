"""A trainer rank's end of the refit, for any backend: reports the rank's boxes, and sends them at each refit."""

from dataclasses import dataclass

import torch

from rlctl.refit.pipeline import ChunkSender
from rlctl.refit.protocol import Header, SendReport, TransportSpec
from rlctl.refit.refit_plan import Layout, RefitPlan, TensorSlice, boxes_digest, layout_digest
from rlctl.refit.transport import call_off, open_sender
from rlctl.refit.weight_source import Sharded, WeightSource


@dataclass(frozen=True)
class Holding:
    """Boxes (parts of tensors) that a rank has, and the memory of its device."""

    # Hash of the rank's layout (`layout_digest`), equal on every rank.
    layout_digest: str
    # Hash of the rank's boxes. `boxes` is empty unless the driver asked for the boxes themselves.
    boxes_digest: str
    boxes: list[TensorSlice]
    # Bytes of memory of the rank's device; on a CPU, of the host.
    device_bytes: int


class SendsWeights:
    """Base class of a trainer rank's actor: the methods that the driver's `Refit` calls."""

    def __init__(self, sharded: Sharded, rank: int, device: torch.device) -> None:
        self._sharded = sharded
        self._sending_rank = rank
        self._sending_device = device
        self._sender: ChunkSender | None = None
        # Transport of the last `refit_open`, which may still be joining.
        self._transport_spec: TransportSpec | None = None

    def refit_layout(self, dtype: str) -> Layout:
        """Return (Hugging Face name, shape, dtype) of every whole tensor. dtype: the one in which tensors are sent."""
        return self._sharded.layout(dtype)

    def refit_holding(self, dtype: str, sends: bool) -> Holding:
        """Return the rank's boxes for the plan, and a hash of its layout.

        The layout itself would be too large: 256 layouts of a 235B mixture of experts are 590 MB. sends: True if the
        rank sends weights, so that the plan needs its boxes; False if other ranks send the same boxes.
        """
        if self._sending_device.type == "cuda":
            memory = torch.cuda.get_device_properties(self._sending_device).total_memory
        else:
            import psutil

            memory = int(psutil.virtual_memory().total)
        boxes = [shard.box for shard in self._sharded.shards()]
        return Holding(
            layout_digest=layout_digest(self._sharded.layout(dtype)),
            boxes_digest=boxes_digest(boxes),
            boxes=boxes if sends else [],
            device_bytes=memory,
        )

    def refit_open(self, spec: TransportSpec, plan: RefitPlan) -> None:
        """Close the previous transport if any, and join the new one."""
        self.refit_close()
        self._transport_spec = spec
        self._source = WeightSource(plan, self._sending_rank - spec.first_rank, self._sharded.shards())
        self._sender = open_sender(spec, self._source, self._sending_device)

    def refit_send(self, header: Header) -> SendReport:
        """Send this rank's part of a version. The weights do not change meanwhile, since only this thread changes them.

        Raises RefitError if the trainer moved its weights to other memory since `refit_open`.
        """
        if self._sender is None:
            raise RuntimeError("refit_open comes before refit_send")
        report = self._sender.send(header)
        # Verify after sending, because verifying takes milliseconds for which receivers would wait. An error ends the
        # run anyway.
        self._source.verify_in_place(self._sharded.shards())
        return report

    def refit_drop(self, receivers: list[int], reason: str) -> None:
        """Stop waiting for these receivers (ranks from 1). Called while `refit_open` or `refit_send` runs."""
        if self._sender:
            self._sender.drop(receivers, reason)
        # Without a sender `refit_open` still waits for all members to meet. Rank 0 runs the store at which they meet.
        elif self._transport_spec and self._sending_rank == 0:
            call_off(self._transport_spec, reason)

    def refit_close(self) -> None:
        """Close the transport."""
        if self._sender:
            self._sender.close()
        self._sender = None

    def rest(self) -> None:
        """Free device memory for the engines. Only called if engines share the trainer's devices."""
        raise NotImplementedError
