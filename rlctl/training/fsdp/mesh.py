"""The device mesh of FSDP ranks: one sharded model, or several replicas of it (hybrid sharding, HSDP)."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def make_meshes(device: str, world: int, replicas: int) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """Return the mesh that shards this rank's replica, and the group of ranks that hold the same shard.

    Consecutive ranks share a replica: `world / replicas` ranks. The group is None for one replica. device: `cuda` or
    `cpu`, as torch names it.
    """
    if replicas == 1:
        return init_device_mesh(device, (world,)), None
    mesh = init_device_mesh(device, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    return mesh["shard"], mesh.get_group("replicate")
