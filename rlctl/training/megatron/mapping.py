"""Maps Megatron's parameters to parts of Hugging Face tensors. Loading, refit, export and checkpoints all use the map.

Megatron stores q, k and v of a layer in one matrix, ordered by the groups of heads that share k and v. It stores gate
and up in another matrix. With tensor parallelism a rank holds only some rows (column-parallel) or some columns
(row-parallel) of each matrix.
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
    """A rectangular part of one Hugging Face tensor, with a view of the memory that holds the part."""

    # Name of the tensor on disk, and the shape of the whole tensor.
    name: str
    shape: Shape
    # Index in the whole tensor at which the part begins.
    start: Shape
    # The part's values: a view of a Megatron parameter, or of a tensor of the same shape.
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
    """Map from the Megatron parameters of this rank's pipeline stage to parts of Hugging Face tensors."""

    def __init__(self, policy: MegatronPolicy, hf: Any, table: ParameterTable) -> None:
        self._config = policy.config
        self._hf = hf
        self._table = table
        # This rank's index among the tensor-parallel ranks and their count. Then the same for expert-parallel ranks.
        self._tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self._tensor_ranks = parallel_state.get_tensor_model_parallel_world_size()
        self._expert_rank = parallel_state.get_expert_model_parallel_rank()
        self._expert_ranks = parallel_state.get_expert_model_parallel_world_size()
        layers = policy.decoder.layers
        self._first_layer = layers[0].layer_number - 1 if len(layers) else 0

    @property
    def is_tied(self) -> bool:
        """True if the output layer uses the embedding matrix as its weight."""
        return bool(self._hf.tie_word_embeddings)

    def parts(self, name: str, tensor: Tensor) -> list[Part]:
        """Return the parts of Hugging Face tensors that make up Megatron parameter `name`, as views of `tensor`.

        tensor: the parameter, or another tensor of its shape. Raises KeyError for a parameter that belongs to no
        Hugging Face tensor.
        """
        if name == "embedding.word_embeddings.weight":
            return [self._row_part(_EMBEDDING, tensor)]
        if name == "output_layer.weight":
            return [self._row_part(_EMBEDDING if self.is_tied else "lm_head.weight", tensor)]
        if name == "decoder.final_layernorm.weight":
            return [_whole_part("model.norm.weight", tensor)]
        match = _LAYER.fullmatch(name)
        if not match:
            raise KeyError(name)
        return list(self._layer_parts(f"model.layers.{self._first_layer + int(match[1])}.", match[2], tensor))

    def fuse(self, part: Part) -> tuple[str, Shape, Shape]:
        """Return the (name, whole shape, start) of a part in transformers' parameter, which may fuse several tensors.

        For example, each expert of a layer has its own tensors on disk, which transformers fuses to one parameter.
        """
        row = self._table.by_name[part.name]
        start, _ = row.place(part.start, tuple(part.view.shape))
        return str(row.target), row.whole, start

    def is_replicated(self, name: str) -> bool:
        """Return True if every tensor-parallel rank holds the whole parameter."""
        match = _LAYER.fullmatch(name)
        return name == "decoder.final_layernorm.weight" or (match is not None and match[2] in _WHOLE)

    def _layer_parts(self, layer: str, name: str, tensor: Tensor) -> Iterator[Part]:
        if name in _WHOLE:
            yield _whole_part(layer + _WHOLE[name], tensor)
        elif name.startswith("self_attention.linear_qkv."):
            yield from self._head_parts(layer, name.rpartition(".")[2], tensor)
        elif name == "self_attention.linear_proj.weight":
            yield self._column_part(layer + "self_attn.o_proj.weight", tensor)
        elif name == "mlp.linear_fc1.weight":
            for projection, half in zip(("gate", "up"), tensor.chunk(2)):
                yield self._row_part(f"{layer}mlp.{projection}_proj.weight", half)
        elif name == "mlp.linear_fc2.weight":
            yield self._column_part(layer + "mlp.down_proj.weight", tensor)
        elif expert := _EXPERT.fullmatch(name):
            yield from self._expert_parts(layer, int(expert[1]), expert[2], tensor)
        else:
            raise KeyError(layer + name)

    def _head_parts(self, layer: str, leaf: str, tensor: Tensor) -> Iterator[Part]:
        """Yield the parts of the fused q, k, v matrix or bias. leaf: "weight" or "bias".

        The rows are ordered by groups of query heads that share one k and one v head. Each group has its q rows first,
        then its k rows, then its v rows.
        """
        groups = self._config.num_query_groups
        head_dim = self._config.kv_channels
        heads = self._config.num_attention_heads // groups
        columns = tensor.shape[1:]
        rank_groups = tensor.view(groups // self._tensor_ranks, (heads + 2) * head_dim, *columns)
        for number, group in enumerate(rank_groups, self._tensor_rank * len(rank_groups)):
            first_head = 0
            for projection, count in (("q", heads), ("k", 1), ("v", 1)):
                rows = count * head_dim
                yield Part(
                    name=f"{layer}self_attn.{projection}_proj.{leaf}",
                    shape=(groups * rows, *columns),
                    start=(number * rows, *(0,) * len(columns)),
                    view=group[first_head * head_dim : (first_head + count) * head_dim],
                )
                first_head += count

    def _expert_parts(self, layer: str, rank_expert: int, linear: str, tensor: Tensor) -> Iterator[Part]:
        expert = self._expert_rank * (self._config.num_moe_experts // self._expert_ranks) + rank_expert
        stem = f"{layer}mlp.experts.{expert}."
        if linear == "linear_fc2":
            yield _whole_part(stem + "down_proj.weight", tensor)
        else:
            for projection, half in zip(("gate", "up"), tensor.chunk(2)):
                yield _whole_part(f"{stem}{projection}_proj.weight", half)

    def _row_part(self, name: str, tensor: Tensor) -> Part:
        rows, *columns = tensor.shape
        return Part(
            name=name,
            shape=(rows * self._tensor_ranks, *columns),
            start=(self._tensor_rank * rows, *(0,) * len(columns)),
            view=tensor,
        )

    def _column_part(self, name: str, tensor: Tensor) -> Part:
        rows, columns = tensor.shape
        return Part(
            name=name,
            shape=(rows, columns * self._tensor_ranks),
            start=(0, self._tensor_rank * columns),
            view=tensor,
        )


def _whole_part(name: str, tensor: Tensor) -> Part:
    return Part(name=name, shape=tuple(tensor.shape), start=(0,) * tensor.ndim, view=tensor)


def read_parts(parts: list[Part], read_slice: Callable[[str, Shape, Shape, Shape], Tensor]) -> None:
    """Fill the view of every part from disk. read_slice: (name, whole shape, start, extent) -> values of the part."""
    for part in parts:
        part.view.copy_(read_slice(part.name, part.shape, part.start, tuple(part.view.shape)))


class Exporter:
    """Joins the ranks' parts to whole Hugging Face tensors, one tensor after the other to bound the memory."""

    def __init__(self, parameters: dict[str, nn.Parameter], mapping: Mapping, device: torch.device) -> None:
        self._parameters = parameters
        self._mapping = mapping
        self._device = device
        # Names of parameters that this rank does not export, because another rank has the same parameter.
        self.mirrored: set[str] = set()
        if parallel_state.get_tensor_model_parallel_rank() > 0:
            self.mirrored.update(name for name in parameters if mapping.is_replicated(name))
        if mapping.is_tied and not parallel_state.is_pipeline_first_stage():
            # The last stage's output weight is a copy of the embedding, which the first stage exports.
            self.mirrored.update(name for name in parameters if name == "output_layer.weight")

    def tensors(self, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for every tensor of `layout`, in its order and dtype.

        Every rank gets the whole tensor. All ranks must iterate together, because each tensor is an all-reduce.
        """
        dense_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        expert_rank = parallel_state.get_expert_data_parallel_rank()
        parts: dict[str, list[Part]] = {}
        for name, parameter in self._parameters.items():
            # Data-parallel ranks have the same parameter. Only the first of these ranks exports it.
            copy_number = dense_rank if getattr(parameter, "allreduce", True) else expert_rank
            if name not in self.mirrored and copy_number == 0:
                for part in self._mapping.parts(name, parameter.detach()):
                    parts.setdefault(part.name, []).append(part)
        for name, shape, dtype in layout:
            whole_tensor = torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)
            for part in parts.get(name, ()):
                box = tuple(slice(begin, begin + size) for begin, size in zip(part.start, part.view.shape))
                whole_tensor[box].copy_(part.view)
            if dist.get_world_size() > 1:
                dist.all_reduce(whole_tensor)
            yield name, whole_tensor
