"""A layer's experts through one grouped matrix product each way, where the device has them; else one by one.

Weights, their names and checkpoints are those of Megatron's SequentialMLP.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """SwiGLU experts without biases."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """permuted_local_hidden_states [N, hidden], by expert; tokens_per_expert [experts]; permuted_probs [N]."""
        hidden = permuted_local_hidden_states
        if hidden.dtype != torch.bfloat16 or not hidden.is_cuda or len(hidden) == 0:
            output, _ = super().forward(hidden, tokens_per_expert, permuted_probs)
            return output, None
        ends = tokens_per_expert.cumsum(0).to(device=hidden.device, dtype=torch.int32)
        up = torch.stack([expert.linear_fc1.weight for expert in self.local_experts]).transpose(1, 2)
        down = torch.stack([expert.linear_fc2.weight for expert in self.local_experts]).transpose(1, 2)
        gate, value = _grouped(hidden, up, ends).chunk(2, -1)
        inner = (F.silu(gate) * value * permuted_probs[:, None]).to(hidden.dtype)
        return _grouped(inner, down, ends), None


def _grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    product: Any = F.grouped_mm
    result: Tensor = product(x, weights, offs=ends)
    return result
