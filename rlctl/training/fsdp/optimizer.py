"""AdamW over sharded float32 masters."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlctl.config.schema import OptimizerSection

Named = dict[str, nn.Parameter]


def build_adamw(parameters: Named, section: OptimizerSection) -> torch.optim.AdamW:
    """Build AdamW with decay on matrices alone. Its state is made at once, so that loading and saving find it."""
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    beta1, beta2 = section.betas
    optimizer = torch.optim.AdamW(groups, lr=section.lr, betas=(beta1, beta2), eps=section.eps, fused=True)
    for p in parameters.values():
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return AdamW's two moments of every parameter: 8 bytes a parameter. Step counts take next to nothing."""
    return [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, sharing memory with `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
