"""Megatron's parameters as parts of Hugging Face tensors: one mapping for loading, refit, export and checkpoints.

Megatron keeps q, k and v of a layer in one matrix, by groups of heads that share k and v; gate and up in one; and of
each matrix only this rank's rows (column-parallel) or columns (row-parallel).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from rlctl.models.parameter_table import Layout, ParameterTable
from rlctl.training.megatron.model import MegatronPolicy

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """The part of the whole tensor `name` (as on disk) of `shape` that begins at `start`."""

    name: str
    shape: Shape
    start: Shape
    # View of the given memory.
    view: Tensor


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_WHOLE = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_EMBEDDING = "model.embed_tokens.weight"


class Mapping:
    """The mapping of the parameters of this rank's stage."""

    def __init__(self, policy: MegatronPolicy, hf: Any, table: ParameterTable) -> None:
        self._config, self._hf, self._table = policy.config, hf, table
        # Number and count of tensor-parallel and of expert-parallel ranks.
        self._tensor = parallel_state.get_tensor_model_parallel_rank()
        self._tensors = parallel_state.get_tensor_model_parallel_world_size()
        self._expert_rank = parallel_state.get_expert_model_parallel_rank()
        self._expert_ranks = parallel_state.get_expert_model_parallel_world_size()
        layers = policy.decoder.layers
        self._first = layers[0].layer_number - 1 if len(layers) else 0

    @property
    def tied(self) -> bool:
        """True if the output weight is the embedding."""
        return bool(self._hf.tie_word_embeddings)

    def parts(self, name: str, tensor: Tensor) -> list[Part]:
        """Return the parts that parameter `name` is made of, as views of `tensor`.

        tensor: the parameter, or anything of its shape. Raises KeyError for a parameter without a Hugging Face tensor.
        """
        if name == "embedding.word_embeddings.weight":
            return [self._row_part(_EMBEDDING, tensor)]
        if name == "output_layer.weight":
            return [self._row_part(_EMBEDDING if self.tied else "lm_head.weight", tensor)]
        if name == "decoder.final_layernorm.weight":
            return [_whole_part("model.norm.weight", tensor)]
        found = _LAYER.fullmatch(name)
        if not found:
            raise KeyError(name)
        return list(self._of_layer(f"model.layers.{self._first + int(found[1])}.", found[2], tensor))

    def fused(self, part: Part) -> tuple[str, Shape, Shape]:
        """Return name, shape and start of a part where a layer's experts are one tensor, as they are in memory."""
        row = self._table.by_name[part.name]
        return str(row.target), row.whole, row.place(part.start, tuple(part.view.shape))[0]

    def replicated(self, name: str) -> bool:
        """Return true if every tensor-parallel rank holds the whole parameter."""
        found = _LAYER.fullmatch(name)
        return name == "decoder.final_layernorm.weight" or (found is not None and found[2] in _WHOLE)

    def _of_layer(self, layer: str, name: str, tensor: Tensor) -> Iterator[Part]:
        if name in _WHOLE:
            yield _whole_part(layer + _WHOLE[name], tensor)
        elif name.startswith("self_attention.linear_qkv."):
            yield from self._heads(layer, name.rpartition(".")[2], tensor)
        elif name == "self_attention.linear_proj.weight":
            yield self._column_part(layer + "self_attn.o_proj.weight", tensor)
        elif name == "mlp.linear_fc1.weight":
            for part, half in zip(("gate", "up"), tensor.chunk(2)):
                yield self._row_part(f"{layer}mlp.{part}_proj.weight", half)
        elif name == "mlp.linear_fc2.weight":
            yield self._column_part(layer + "mlp.down_proj.weight", tensor)
        elif expert := _EXPERT.fullmatch(name):
            yield from self._expert(layer, int(expert[1]), expert[2], tensor)
        else:
            raise KeyError(layer + name)

    def _heads(self, layer: str, leaf: str, tensor: Tensor) -> Iterator[Part]:
        """Yield group by group: its heads' rows of q, then one head's of k, one of v."""
        groups, dim = self._config.num_query_groups, self._config.kv_channels
        heads = self._config.num_attention_heads // groups
        rest = tensor.shape[1:]
        own = tensor.view(groups // self._tensors, (heads + 2) * dim, *rest)
        for number, group in enumerate(own, self._tensor * len(own)):
            begin = 0
            for part, count in (("q", heads), ("k", 1), ("v", 1)):
                view = group[begin * dim : (begin + count) * dim]
                start = (number * count * dim, *(0,) * len(rest))
                yield Part(f"{layer}self_attn.{part}_proj.{leaf}", (groups * count * dim, *rest), start, view)
                begin += count

    def _expert(self, layer: str, local: int, which: str, tensor: Tensor) -> Iterator[Part]:
        number = self._expert_rank * (self._config.num_moe_experts // self._expert_ranks) + local
        stem = f"{layer}mlp.experts.{number}."
        if which == "linear_fc2":
            yield _whole_part(stem + "down_proj.weight", tensor)
        else:
            for part, half in zip(("gate", "up"), tensor.chunk(2)):
                yield _whole_part(f"{stem}{part}_proj.weight", half)

    def _row_part(self, name: str, tensor: Tensor) -> Part:
        rows, rest = tensor.shape[0], tensor.shape[1:]
        shape = (rows * self._tensors, *rest)
        return Part(name, shape, (self._tensor * rows, *(0,) * len(rest)), tensor)

    def _column_part(self, name: str, tensor: Tensor) -> Part:
        rows, columns = tensor.shape
        return Part(name, (rows, columns * self._tensors), (0, self._tensor * columns), tensor)


def _whole_part(name: str, tensor: Tensor) -> Part:
    return Part(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


def read(parts: list[Part], slice_of: Callable[[str, Shape, Shape, Shape], Tensor]) -> None:
    """Fill every part. slice_of: (name, whole shape, start, extent) -> that part of a stored tensor."""
    for part in parts:
        part.view.copy_(slice_of(part.name, part.shape, part.start, tuple(part.view.shape)))


class Exporter:
    """Whole Hugging Face tensors from the parts that ranks hold, one alive at a time."""

    def __init__(self, named: dict[str, nn.Parameter], mapping: Mapping, device: torch.device) -> None:
        self._named, self._mapping, self._device = named, mapping, device
        later = parallel_state.get_tensor_model_parallel_rank() > 0
        copied = mapping.tied and not parallel_state.is_pipeline_first_stage()
        # Parameters that another rank, holding the same, answers for.
        self.mirrored = {
            name for name in named if (later and mapping.replicated(name)) or (copied and name == "output_layer.weight")
        }

    def tensors(self, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of `layout`, in its order and dtype; on every rank, in lockstep."""
        dense = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        expert = parallel_state.get_expert_data_parallel_rank()
        parts: dict[str, list[Part]] = {}
        for name, parameter in self._named.items():
            copies_before = dense if getattr(parameter, "allreduce", True) else expert
            if name not in self.mirrored and copies_before == 0:
                for part in self._mapping.parts(name, parameter.detach()):
                    parts.setdefault(part.name, []).append(part)
        for name, shape, dtype in layout:
            whole = torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)
            for part in parts.get(name, ()):
                whole[tuple(slice(a, a + n) for a, n in zip(part.start, part.view.shape))].copy_(part.view)
            if dist.get_world_size() > 1:
                dist.all_reduce(whole)
            yield name, whole
