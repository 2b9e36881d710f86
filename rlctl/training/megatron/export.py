"""Whole Hugging Face tensors from the parts that ranks hold, one alive at a time."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from rlctl.models.hf_folder import Layout
from rlctl.training.megatron.mapping import Mapping, Part


class Exporter:
    """mirrored: parameters that another rank, holding the same, answers for."""

    def __init__(self, named: dict[str, nn.Parameter], mapping: Mapping, device: torch.device) -> None:
        self._named, self._mapping, self._device = named, mapping, device
        later = parallel_state.get_tensor_model_parallel_rank() > 0
        copied = mapping.tied and not parallel_state.is_pipeline_first_stage()
        self.mirrored = {
            name for name in named if (later and mapping.replicated(name)) or (copied and name == "output_layer.weight")
        }

    def tensors(self, layout: Layout, values: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of `layout`, in its order and dtype; on every rank, in lockstep.

        values: what stands for the parameters, by name and of their shape; None: they themselves.
        """
        parts: dict[str, list[Part]] = {}
        for name, parameter in self._named.items():
            if name not in self.mirrored and _first_copy(parameter):
                for part in self._mapping.parts(name, values[name] if values else parameter.detach()):
                    parts.setdefault(part.name, []).append(part)
        for name, shape, dtype in layout:
            whole = torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)
            for part in parts.get(name, ()):
                whole[tuple(slice(a, a + n) for a, n in zip(part.start, part.view.shape))].copy_(part.view)
            if dist.get_world_size() > 1:
                dist.all_reduce(whole)
            yield name, whole


def _first_copy(parameter: nn.Parameter) -> bool:
    """Whether this is the first of the data-parallel ranks that hold a parameter."""
    if getattr(parameter, "allreduce", True):
        return int(parallel_state.get_data_parallel_rank(with_context_parallel=True)) == 0
    return int(parallel_state.get_expert_data_parallel_rank()) == 0
