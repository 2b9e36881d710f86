"""Device mesh of FSDP ranks: the model is sharded over all ranks, or each replica over some ranks (HSDP)."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

# Largest number of float32 elements in one all-reduce of gradients: 256 MiB.
_BUCKET = 1 << 26


def make_meshes(device: str, world: int, replicas: int) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """Return the mesh over which this rank's replica is sharded, and the group of ranks that hold the same shard.

    A replica has `world / replicas` consecutive ranks. With one replica the group is None. device: `cuda` or `cpu`.
    """
    if replicas == 1:
        return init_device_mesh(device, (world,)), None
    mesh = init_device_mesh(device, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    return mesh["shard"], mesh.get_group("replicate")


def shard_start(tensor: Tensor, mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the index in the whole tensor at which this rank's shard begins.

    FSDP shards a tensor by rows. Each rank gets ceil(rows / ranks) rows, and the last ranks fewer or none.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    first_row = mesh.get_local_rank() * -(-tensor.shape[0] // mesh.size())
    return first_row, *(0,) * (tensor.ndim - 1)


def add_over_replicas(gradients: list[Tensor], replicas: dist.ProcessGroup) -> None:
    """Sum float32 gradients in place over the group `replicas`: the ranks that hold the same shard."""
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=replicas)
        begin = 0
        for gradient in bucket:
            end = begin + gradient.numel()
            gradient.copy_(flat[begin:end].view_as(gradient))
            begin = end


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in lists of at most `_BUCKET` elements together. A larger tensor is alone in its list."""
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
