"""vLLM's loading of a model with adapters: they are installed before vLLM compiles the model and captures graphs.

`load_format=rlctl_adapters` names the loader below, which has vLLM's own loader load the model. The adapters travel in
`additional_config`. vLLM's cache of compiled graphs hashes this: a graph without adapters is never taken for one with.
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
# Devices on which A lies below its layer's weight. On a CPU vLLM repacks the weight.
folded_on = {"cuda"}
# Tensor cores need a multiple of this many rows.
_ROW_MULTIPLE = 16


def load_arguments(spec: AdapterSpec, load_format: str, folder: str | None) -> dict[str, Any]:
    """Return the arguments by which vLLM loads a model with adapters.

    load_format: that of its weights. folder: PEFT's, of the first adapters; None: they add nothing.
    """
    adapter_config = {**asdict(spec), "load_format": load_format, "folder": folder}
    return {"load_format": LOAD_FORMAT, "additional_config": {KEY: adapter_config}}


def find_adapters(model: torch.nn.Module) -> EngineAdapters | None:
    """Return the adapters of a loaded model, None without.

    The module of vLLM's workers imports this one, which registers the loader in their processes.
    """
    return model.__dict__.get("rl_adapters")


@register_model_loader(LOAD_FORMAT)
class AdapterModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads a model as vLLM does, and gives it adapters."""

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
            # Before CPU kernels repack the weights: parameters are then empty.
            slices.extend(_find_targets(model, Path(config.model), adapters.spec))

        base_loader.load_weights = load_weights
        with _reserve_rows(adapters.spec):
            model: torch.nn.Module = base_loader.load_model(vllm_config, model_config, prefix)
        adapters.install(model, slices)
        if folder:
            adapters.fill(Path(folder))
        # No module's attribute: it is none of the model's tensors.
        model.__dict__["rl_adapters"] = adapters
        return model

    def download_model(self, model_config: Any) -> None:
        """Do nothing: the folder is on this machine."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Raise: a loaded model keeps its base weights."""
        raise RuntimeError("a model with adapters is loaded once")


def _find_targets(model: torch.nn.Module, folder: Path, spec: AdapterSpec) -> list[tuple[str, Slice]]:
    """Return the places of all targets, by the copies that the model's own loaders make. Raises ModelError."""
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
    """Return by a weight's name on disk: its target, the row and column where it begins there, and its shape."""
    from rlctl.models.facts import has_weights
    from rlctl.models.weight_headers import weight_headers

    # The names of Transformers, which most folders have on disk.
    plain = {f"{target.name}.weight": (target.name, 0, 0, (target.outputs, target.inputs)) for target in spec.targets}
    if not has_weights(folder):
        return plain
    headers = weight_headers(folder)
    if all(name in headers for name in plain):
        return plain
    from rlctl.models.meta_model import causal_lm
    from rlctl.models.parameter_table import derive_table

    stored = {name: (dtype, tuple(shape)) for name, (dtype, shape) in headers.items()}
    table = derive_table(causal_lm(folder), stored, folder)
    names = {}
    for target in spec.targets:
        for row in table.rows_of(f"{target.name}.weight"):
            names[row.name] = (target.name, row.start[0], row.start[1], row.shape)
    return names


@contextmanager
def _reserve_rows(spec: AdapterSpec) -> Iterator[None]:
    """Have linear layers that are built meanwhile hold rows for A below their weight, in one memory.

    On devices of `folded_on` alone. Made before weights are loaded, layer by layer: a second memory for each loaded
    weight would double what vLLM reserves.
    """
    create_base_weights = UnquantizedLinearMethod.create_weights

    def create_weights(method: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        create_base_weights(method, layer, *args, **kwargs)
        weight = layer.weight
        if weight.device.type not in folded_on:
            return
        parts = kwargs.get("output_partition_sizes", args[1] if len(args) > 1 else [0])
        rows_of_a = -(-spec.rank * len(parts) // _ROW_MULTIPLE) * _ROW_MULTIPLE
        rows, columns = weight.shape
        folded_weight = torch.zeros(rows + rows_of_a, columns, dtype=weight.dtype, device=weight.device)
        layer.register_buffer("rl_weight", folded_weight, persistent=False)
        # The parameter is a view of the buffer from now on.
        weight.data = layer.rl_weight[:rows]

    UnquantizedLinearMethod.create_weights = create_weights
    try:
        yield
    finally:
        UnquantizedLinearMethod.create_weights = create_base_weights
