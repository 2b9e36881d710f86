"""The three transports by name. Each has one file, and only this module asks which transport is used."""

import torch

from rlctl.refit.pipeline import ChunkReceiver, ChunkSender, ReceiverTransport, SenderTransport
from rlctl.refit.protocol import TransportSpec
from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.weight_source import WeightSource

_HOST = torch.device("cpu")


def open_sender(spec: TransportSpec, source: WeightSource, device: torch.device) -> ChunkSender:
    """Join the transport named by `spec`, and return this trainer rank's end."""
    transport: SenderTransport
    if spec.kind == "shm":
        from rlctl.refit.shm import ShmSender

        transport = ShmSender(spec, source)
        device = _HOST
    elif spec.kind == "ipc":
        from rlctl.refit.ipc import IpcSender

        transport = IpcSender(spec, source, device)
    else:
        from rlctl.refit.broadcast import BroadcastSender

        transport = BroadcastSender(spec, source, device)
    return ChunkSender(transport, source, device, spec.timeout_s)


def open_receiver(spec: TransportSpec, plan: RefitPlan, rank: int, device: torch.device) -> ChunkReceiver:
    """Join the transport named by `spec`, and return an engine worker's end.

    rank: number of the worker among the workers of all engines, from 1.
    """
    transport: ReceiverTransport
    if spec.kind == "shm":
        from rlctl.refit.shm import ShmReceiver

        transport = ShmReceiver(spec, plan)
        device = _HOST
    elif spec.kind == "ipc":
        from rlctl.refit.ipc import IpcReceiver

        transport = IpcReceiver(spec, plan, rank, device)
    else:
        from rlctl.refit.broadcast import BroadcastReceiver

        transport = BroadcastReceiver(spec, plan, rank, device)
    return ChunkReceiver(transport, plan, rank, device, spec.timeout_s)


def call_off(spec: TransportSpec, reason: str) -> None:
    """Tell members that are still joining the transport to give up, because a member is gone."""
    if spec.kind == "broadcast":
        from rlctl.refit.process_group import announce_loss, rendezvous

        announce_loss(rendezvous(spec, False), reason)


def receiver_bytes(spec: TransportSpec, plan: RefitPlan) -> int:
    """Return the most bytes of device memory that an engine worker's end uses for buffers."""
    if spec.kind != "broadcast":
        return 0
    from rlctl.refit.broadcast import receiver_bytes

    return receiver_bytes(spec, plan)
