"""A few tensors as trainer ranks hold them, and the plan and source of their refit."""

import torch
from torch import Tensor

from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.weight_source import Shard, WeightSource

CPU = torch.device("cpu")


def make_weights(version: int = 0) -> dict[str, Tensor]:
    """Return tensors of every dtype that refits send: with odd sizes, a scalar, an empty, a transposed, a large one."""
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


def layout_of(weights: dict[str, Tensor]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in weights.items()]


def shards_of(weights: dict[str, Tensor], rank: int, world: int) -> list[Shard]:
    """Return this rank's rows of each tensor: ceil(rows / ranks), fewer for the last rank. Rank 0 has the scalars."""
    shards = []
    for name, tensor in weights.items():
        if tensor.ndim == 0:
            if rank == 0:
                shards.append(Shard(name, (), tensor))
            continue
        rows_per_rank = -(-tensor.shape[0] // world)
        rows = tensor[rank * rows_per_rank : (rank + 1) * rows_per_rank]
        if rows.numel():
            start = (rank * rows_per_rank, *[0] * (tensor.ndim - 1))
            shards.append(Shard(name, start, rows))
    return shards


def plan_for(weights: dict[str, Tensor], world: int = 1, buffer_bytes: int = 1 << 20) -> RefitPlan:
    boxes = [[shard.box for shard in shards_of(weights, rank, world)] for rank in range(world)]
    return RefitPlan.build(layout_of(weights), boxes, buffer_bytes)


def source_of(plan: RefitPlan, weights: dict[str, Tensor], rank: int = 0, world: int = 1) -> WeightSource:
    return WeightSource(plan, rank, shards_of(weights, rank, world))
