"""AdamW of an FSDP2 rank, with all of its state from the start."""

from collections.abc import Mapping

import torch
from torch import nn

from rlctl.config.trainer_schema import OptimizerSection
from rlctl.training.update import decayed_names

# AdamW's own names of its moments.
MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(
    lm: nn.Module, parameters: Mapping[str, nn.Parameter], section: OptimizerSection
) -> torch.optim.AdamW:
    """Make AdamW of the trained parameters of `lm` with all of its state, so that loading and saving find it."""
    decayed = decayed_names(lm)
    decayed_parameters = [parameter for name, parameter in parameters.items() if name in decayed]
    undecayed_parameters = [parameter for name, parameter in parameters.items() if name not in decayed]
    groups = [
        {"params": decayed_parameters, "weight_decay": section.weight_decay},
        {"params": undecayed_parameters, "weight_decay": 0.0},
    ]
    betas = section.betas[0], section.betas[1]
    optimizer = torch.optim.AdamW(groups, lr=section.lr, betas=betas, eps=section.eps, fused=True)
    for parameter in parameters.values():
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments = {key: torch.zeros_like(parameter) for key in MOMENTS}
        optimizer.state[parameter] = {"step": step, **moments}
    return optimizer
