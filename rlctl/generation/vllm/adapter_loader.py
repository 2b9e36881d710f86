"""Model loader for vLLM that adds adapters to a model, before vLLM compiles the model and captures graphs.

vLLM's option `load_format=rlctl_adapters` chooses the loader below. It calls vLLM's own loader, and adds the adapters
that `additional_config` describes. vLLM's cache of compiled graphs hashes `additional_config`, so graphs with and
without adapters are never confused.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader import BaseModelLoader, get_model_loader, register_model_loader

from rlctl.config.errors import ModelError
from rlctl.generation.vllm.adapter_layers import EngineAdapters, Slice, find_slices
from rlctl.generation.vllm.param_layout import UnsupportedLayout, record_copies
from rlctl.models.adapters import AdapterSpec
from rlctl.models.layer_kinds import LinearLayer

LOAD_FORMAT = "rlctl_adapters"
# Key of the adapters in vLLM's `additional_config`.
KEY = "rlctl_adapters"
# Types of devices on which A is stored as further rows of its layer's weight. Not on a CPU, where vLLM repacks weights.
folded_on = {"cuda"}
# The number of A's rows is rounded up to a multiple of this, as tensor cores need.
_ROW_MULTIPLE = 16


def load_arguments(spec: AdapterSpec, load_format: str, folder: str | None) -> dict[str, Any]:
    """Return the arguments with which vLLM loads a model with adapters.

    load_format: format of the base weights. folder: PEFT folder of A and B; None: A and B begin as zeros.
    """
    adapter_config = {**asdict(spec), "load_format": load_format, "folder": folder}
    return {"load_format": LOAD_FORMAT, "additional_config": {KEY: adapter_config}}


def find_adapters(model: torch.nn.Module) -> EngineAdapters | None:
    """Return the adapters of a loaded model; None if it has none.

    The extension of vLLM's workers imports this function, and so registers the loader below in their processes.
    """
    return model.__dict__.get("rl_adapters")


@register_model_loader(LOAD_FORMAT)
class AdapterModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads a model by vLLM's own loader, and adds adapters to its linear layers."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Return the model; its `rl_adapters` are the `EngineAdapters`."""
        adapter_config = dict(vllm_config.additional_config[KEY])
        base_loader = get_model_loader(replace(self.load_config, load_format=adapter_config.pop("load_format")))
        folder = adapter_config.pop("folder")
        targets = tuple(LinearLayer(**target) for target in adapter_config.pop("targets"))
        adapters = EngineAdapters(AdapterSpec(**adapter_config, targets=targets))
        load_base_weights = base_loader.load_weights
        slices = list[tuple[str, Slice]]()

        def load_weights(model: torch.nn.Module, config: Any) -> None:
            load_base_weights(model, config)
            # Find the targets now, because parameters are empty after CPU kernels have repacked the weights.
            slices.extend(_find_targets(model, Path(config.model), adapters.spec))

        base_loader.load_weights = load_weights
        with _reserve_rows(adapters.spec):
            model: torch.nn.Module = base_loader.load_model(vllm_config, model_config, prefix)
        adapters.install(model, slices)
        if folder:
            adapters.fill(Path(folder))
        # Set in `__dict__`, because torch would register the adapters as a part of the model.
        model.__dict__["rl_adapters"] = adapters
        return model

    def download_model(self, model_config: Any) -> None:
        """Do nothing: the model's folder is on this machine already."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Raise RuntimeError: the base weights of a loaded model never change."""
        raise RuntimeError("a model with adapters is loaded once")


def _find_targets(model: torch.nn.Module, folder: Path, spec: AdapterSpec) -> list[tuple[str, Slice]]:
    """Return (layer's name, part of a target) for all targets, found by watching the copies of the model's loaders.

    Raises ModelError if a loader does more than copy.
    """
    hollow: dict[str, torch.Tensor] = {}
    targets: dict[str, tuple[str, int, int]] = {}
    for name, (target, row, column, shape) in _names_on_disk(folder, spec).items():
        hollow[name] = torch.empty(shape, dtype=torch.float32, device="meta")
        targets[name] = (target, row, column)
    try:
        regions = record_copies(model, hollow)
    except UnsupportedLayout as error:
        raise ModelError(f"lora: vLLM does more than copy the weights of targets: {error}") from error
    return find_slices(model, regions, targets)


def _names_on_disk(folder: Path, spec: AdapterSpec) -> Mapping[str, tuple[str, int, int, tuple[int, ...]]]:
    """Return weight's name on disk -> (target's name, first row and column of the weight in the target, shape)."""
    from rlctl.models.facts import has_weights
    from rlctl.models.weight_headers import weight_headers

    # Transformers' names. In most folders they are also the names on disk.
    plain = {f"{target.name}.weight": (target.name, 0, 0, (target.outputs, target.inputs)) for target in spec.targets}
    if not has_weights(folder):
        return plain
    headers = weight_headers(folder)
    if all(name in headers for name in plain):
        return plain
    from rlctl.models.meta_model import language_model
    from rlctl.models.parameter_table import derive_table

    stored = {name: (dtype, tuple(shape)) for name, (dtype, shape) in headers.items()}
    table = derive_table(language_model(folder), stored, folder)
    names = {}
    for target in spec.targets:
        for row in table.rows_of(f"{target.name}.weight"):
            names[row.name] = (target.name, row.start[0], row.start[1], row.shape)
    return names


@contextmanager
def _reserve_rows(spec: AdapterSpec) -> Iterator[None]:
    """Within the block, give each linear layer that is built one tensor for its weight and, as further rows, for A.

    Only on devices of `folded_on`. The tensor is made before the weights are loaded, layer by layer: moving each loaded
    weight into a larger tensor would double the memory that vLLM reserves.
    """
    create_base_weights = UnquantizedLinearMethod.create_weights

    def create_weights(method: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        create_base_weights(method, layer, *args, **kwargs)
        weight = layer.weight
        if weight.device.type not in folded_on:
            return
        # vLLM gives the sizes by keyword or as the second argument: one for each projection of a merged layer. Each of
        # these projections has its own rows of A.
        projection_sizes = kwargs.get("output_partition_sizes", args[1] if len(args) > 1 else [0])
        rows_of_a = -(-spec.rank * len(projection_sizes) // _ROW_MULTIPLE) * _ROW_MULTIPLE
        rows, columns = weight.shape
        folded_weight = torch.zeros(rows + rows_of_a, columns, dtype=weight.dtype, device=weight.device)
        layer.register_buffer("rl_weight", folded_weight, persistent=False)
        # From now on the parameter is a view of the buffer.
        weight.data = layer.rl_weight[:rows]

    UnquantizedLinearMethod.create_weights = create_weights
    try:
        yield
    finally:
        UnquantizedLinearMethod.create_weights = create_base_weights
