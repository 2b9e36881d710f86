"""A few tensors as trainer ranks hold them, and both ends of a transport around them."""

import torch
from torch import Tensor

from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.weight_source import Shard, WeightSource

CPU = torch.device("cpu")


def tensors(version: int = 0) -> dict[str, Tensor]:
    """Every travelling dtype, odd sizes, a scalar, an empty one, one that is not contiguous, a large one."""
    torch.manual_seed(version)
    return {
        "matrix": torch.randn(7, 13),
        "odd": torch.randn(5, 3).to(torch.bfloat16),
        "half": torch.randn(129).to(torch.float16),
        "double": torch.randn(3, 1, 2).to(torch.float64),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5 + version),
        "transposed": torch.randn(4, 6).T,
        "large": torch.randn(600, 1024),
        "last": torch.randn(3),
    }


def layout(held: dict[str, Tensor]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in held.items()]


def shards_of(held: dict[str, Tensor], rank: int, world: int) -> list[Shard]:
    """Rows in runs of equal length, the last rank's shorter; a scalar is rank 0's."""
    found = []
    for name, tensor in held.items():
        if tensor.ndim == 0:
            found += [Shard(name, (), tensor)] if rank == 0 else []
            continue
        per_rank = -(-tensor.shape[0] // world)
        mine = tensor[rank * per_rank : (rank + 1) * per_rank]
        if mine.numel():
            found.append(Shard(name, (rank * per_rank,) + (0,) * (tensor.ndim - 1), mine))
    return found


def plan_for(held: dict[str, Tensor], world: int = 1, buffer_bytes: int = 1 << 20) -> RefitPlan:
    boxes = [[shard.box for shard in shards_of(held, rank, world)] for rank in range(world)]
    return RefitPlan.build(layout(held), boxes, buffer_bytes)


def source_of(plan: RefitPlan, held: dict[str, Tensor], rank: int = 0, world: int = 1) -> WeightSource:
    return WeightSource(plan, rank, shards_of(held, rank, world))
