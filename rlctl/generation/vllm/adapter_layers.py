"""LoRA adapters in a vLLM worker: buffers for A and B, and linear methods that add the adapter's product.

vLLM's own LoRA is not used. Every request uses the same adapter, so rlctl needs no adapter slots, names or indices for
each token. Parameter names, shortened steps, compiled graphs and CUDA graphs stay as without adapters. A layer's
buffers keep their addresses, and are zero until the first refit.

    y + ((x A^T) B^T) * scale        A [sum of ranks, inputs], B [outputs, sum of ranks]

A merged layer (such as qkv_proj) has one A, which stacks the projections' A by rows, and one block-diagonal B. So it
needs two products only. Under tensor parallelism a worker's column-parallel layer has all of A and its rows of B. A
row-parallel layer has its columns of A and all of B: vLLM's own all-reduce adds the partial sums.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod

from rlctl.config.errors import ModelError
from rlctl.models.adapter_folder import AdapterFile
from rlctl.models.adapters import LORA_A, LORA_B, AdapterSpec
from rlctl.refit.param_slices import ParamSlice
from rlctl.refit.refit_plan import TensorSlice

# Names of a layer's buffers.
BUFFER_A = "rl_lora_a"
BUFFER_B = "rl_lora_b"


@dataclass(frozen=True)
class Slice:
    """Part of a target's weight that is in a layer of this worker. A target is a linear layer with an adapter."""

    # Name of the target in Transformers, for example model.layers.0.self_attn.q_proj.
    target: str
    # (first, number) of the rows, and of the columns, of the target's weight in this part.
    rows: tuple[int, int]
    columns: tuple[int, int]
    # First row of this part in the weight of the engine's layer.
    place: int


class AdaptedMethod(LinearMethodBase):  # type: ignore[misc]
    """vLLM's linear method for an adapted layer: adds the products with A and B to the layer's own product."""

    def __init__(self, base_method: Any, scale: float) -> None:
        self.base_method = base_method
        self.scale = scale

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """Raise RuntimeError: the layer's own method has created the weights already."""
        raise RuntimeError("an adapted layer has its weights already")

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the layer's output plus the adapter's output, [tokens, outputs]. x: [tokens, inputs]."""
        base_output: Tensor = self.base_method.apply(layer, x, bias)
        return base_output + linear(linear(x, layer.rl_lora_a), layer.rl_lora_b) * self.scale


class FoldedMethod(AdaptedMethod):
    """vLLM's linear method for an adapted layer on a GPU. A is stored as further rows of the layer's weight, so that
    one product gives the layer's output and x A^T.

    The time of a step with few tokens is bound by the number of kernels. This method adds one kernel instead of two.
    """

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        # The layer's outputs, then x A^T.
        products = linear(x, layer.rl_weight)
        rows = layer.rl_lora_b.shape[0]
        output = products[..., :rows] + linear(products[..., rows:], layer.rl_lora_b) * self.scale
        return output if bias is None else output + bias


class EngineAdapters:
    """All adapters of a vLLM worker."""

    def __init__(self, spec: AdapterSpec) -> None:
        self.spec = spec
        # Full name of a buffer -> the buffer.
        self.buffers: dict[str, Tensor] = {}
        # Parts of the trainer's A and B tensors, each with its view of a buffer.
        self.regions: list[ParamSlice] = []

    @torch.no_grad()
    def install(self, model: torch.nn.Module, slices: Iterable[tuple[str, Slice]]) -> None:
        """Give every adapted layer its buffers and its method. slices: (layer's name in `model`, part of a target).

        Raises ModelError for a layer that is no unquantised linear layer, or has adapters already.
        """
        by_layer: dict[str, list[Slice]] = {}
        for name, part in slices:
            by_layer.setdefault(name, []).append(part)
        for name, parts in by_layer.items():
            self._adapt(name, model.get_submodule(name), parts)

    @torch.no_grad()
    def fill(self, folder: Path) -> None:
        """Load A and B from a PEFT folder into the buffers."""
        file = AdapterFile(folder)
        for region in self.regions:
            box = region.box
            part = tuple(slice(start, start + size) for start, size in zip(box.start, box.shape))
            region.view.copy_(file.tensor(box.name)[part])

    def _adapt(self, name: str, layer: Any, parts: Sequence[Slice]) -> None:
        base_method = _require_adaptable(name, layer)
        rank = self.spec.rank
        targets = list(dict.fromkeys(part.target for part in parts))
        rows = sum(layer.output_partition_sizes) if hasattr(layer, "output_partition_sizes") else layer.output_size
        columns = {part.columns for part in parts}
        if len(columns) != 1:
            raise ModelError(f"lora: {name} holds different inputs of {', '.join(targets)}")
        ((first_column, width),) = columns
        # The layer's weight with rows for A below it; None if A has a separate buffer, as on a CPU.
        folded_weight = getattr(layer, "rl_weight", None)
        if folded_weight is None:
            lora_a = torch.zeros(rank * len(targets), width, dtype=layer.params_dtype, device=layer.weight.device)
            layer.quant_method = AdaptedMethod(base_method, self.spec.scale)
        else:
            lora_a = folded_weight[rows:]
            lora_a.zero_()
            layer.quant_method = FoldedMethod(base_method, self.spec.scale)
        lora_b = torch.zeros(rows, lora_a.shape[0], dtype=lora_a.dtype, device=lora_a.device)
        for key, buffer in ((BUFFER_A, lora_a), (BUFFER_B, lora_b)):
            layer.register_buffer(key, buffer, persistent=False)
            self.buffers[f"{name}.{key}"] = buffer
        for number, target in enumerate(targets):
            first_rank = number * rank
            box = TensorSlice(target + LORA_A, (0, first_column), (rank, width))
            self.regions.append(ParamSlice(box, lora_a[first_rank : first_rank + rank]))
            for part in parts:
                if part.target != target:
                    continue
                first_row, count = part.rows
                view = lora_b[part.place : part.place + count, first_rank : first_rank + rank]
                self.regions.append(ParamSlice(TensorSlice(target + LORA_B, (first_row, 0), (count, rank)), view))


def _require_adaptable(name: str, layer: Any) -> Any:
    """Return a layer's linear method. Raises ModelError for a layer that cannot have an adapter."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, AdaptedMethod):
        raise ModelError(f"lora: {name} has adapters already, which would count twice")
    if not isinstance(layer, LinearBase):
        raise ModelError(f"lora: the engine keeps {name} in a {type(layer).__name__}, which cannot have adapters")
    if type(method) is not UnquantizedLinearMethod:
        raise ModelError(f"lora: {name} is quantised ({type(method).__name__}): adapters need unquantised layers")
    return method


def find_slices(
    model: torch.nn.Module, regions: Iterable[ParamSlice], targets: Mapping[str, tuple[str, int, int]]
) -> list[tuple[str, Slice]]:
    """Return (layer's name in `model`, part of a target that the layer holds) for all targets.

    regions: the targets' weights in the engine, from `record_copies`. targets: weight's name on disk -> (target's name,
    row and column of the target at which this weight begins). Raises ModelError for a target that the engine lacks.
    """
    layers = {
        parameter.untyped_storage().data_ptr(): (name.rpartition(".")[0], parameter)
        for name, parameter in model.named_parameters()
        if name.endswith(".weight") and parameter.ndim == 2
    }
    slices = []
    for region in regions:
        target, row, column = targets[region.box.name]
        storage = region.view.untyped_storage().data_ptr()
        if storage not in layers:
            raise ModelError(f"lora: the engine keeps {target} in no linear layer: it cannot have adapters")
        layer_name, weight = layers[storage]
        inputs = weight.shape[1]
        offset = region.view.storage_offset() - weight.storage_offset()
        if region.view.ndim != 2 or offset % inputs or region.view.shape[1] != inputs:
            raise ModelError(f"lora: the engine cuts the inputs of {target}: it cannot have adapters")
        first_row, first_column = region.box.start
        num_rows, num_columns = region.box.shape
        part = Slice(
            target=target,
            rows=(row + first_row, num_rows),
            columns=(column + first_column, num_columns),
            place=offset // inputs,
        )
        slices.append((layer_name, part))
    placed_targets = {part.target for _, part in slices}
    missing = [target for target, _, _ in targets.values() if target not in placed_targets]
    if missing:
        raise ModelError(
            f"lora: {len(missing)} of {len(targets)} targets have no place in the engine, such as {missing[0]}"
        )
    return slices
