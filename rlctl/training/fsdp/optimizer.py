"""AdamW over sharded float32 masters, and the clipping of their gradients by the norm over all ranks."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlctl.config.schema import OptimizerSection
from rlctl.training.update import check_finite

Named = dict[str, nn.Parameter]


def build_adamw(parameters: Named, section: OptimizerSection) -> torch.optim.AdamW:
    """AdamW with decay on matrices alone; its state is made at once, so that loading and saving find it."""
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
    """AdamW's two of every parameter, which take 8 bytes a parameter. Not its counts of steps: they take nothing."""
    return [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing memory with `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: Named, max_norm: float, loss: Tensor) -> float:
    """Scale all gradients by min(1, max_norm / norm); returns the 2-norm over all ranks before it.

    loss: this rank's share, float64. Raises FloatingPointError, on every rank and with nothing updated, if the norm or
    the loss is not finite: they are reduced and read together, so that the loss costs no wait of its own.
    """
    grads = {name: local(p.grad) for name, p in parameters.items() if p.grad is not None}
    squared = torch.nn.utils.get_total_norm(list(grads.values())).double().square()
    both = torch.stack([squared, loss])
    dist.all_reduce(both)
    square, total = both.tolist()
    norm = math.sqrt(square)
    check_finite(total, norm, lambda: _worst(grads))
    scale = min(1.0, max_norm / (norm + 1e-6))
    for grad in grads.values():
        grad.mul_(scale)
    return norm


def _worst(grads: dict[str, Tensor]) -> str:
    bad = [name for name, grad in grads.items() if not grad.isfinite().all()]
    return f"first in {bad[0]}, {len(bad)} of {len(grads)} tensors" if bad else "on another rank"
