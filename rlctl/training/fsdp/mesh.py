"""The device mesh of FSDP ranks: one sharded model, or several replicas of it (hybrid sharding, HSDP)."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

# Numbers that replicas add up at a time: 256 MiB.
_BUCKET = 1 << 26


def make_meshes(device: str, world: int, replicas: int) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """Return the mesh that shards this rank's replica, and the group of ranks that hold the same shard.

    Consecutive ranks share a replica: `world / replicas` ranks. The group is None for one replica. device: `cuda` or
    `cpu`, as torch names it.
    """
    if replicas == 1:
        return init_device_mesh(device, (world,)), None
    mesh = init_device_mesh(device, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    return mesh["shard"], mesh.get_group("replicate")


def shard_start(tensor: Tensor, mesh: DeviceMesh) -> tuple[int, ...]:
    """Return where this rank's shard begins in the whole tensor: torch cuts rows evenly, rounded up."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    first_row = mesh.get_local_rank() * -(-tensor.shape[0] // mesh.size())
    return first_row, *(0,) * (tensor.ndim - 1)


def add_over_replicas(gradients: list[Tensor], replicas: dist.ProcessGroup) -> None:
    """Add float32 gradients up over the ranks that hold the same shard, in place."""
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=replicas)
        begin = 0
        for gradient in bucket:
            end = begin + gradient.numel()
            gradient.copy_(flat[begin:end].view_as(gradient))
            begin = end


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors together up to `_BUCKET` numbers, a larger one alone."""
    bucket: list[Tensor] = []
    numbers = 0
    for tensor in tensors:
        if bucket and numbers + tensor.numel() > _BUCKET:
            yield bucket
            bucket = []
            numbers = 0
        bucket.append(tensor)
        numbers += tensor.numel()
    if bucket:
        yield bucket
