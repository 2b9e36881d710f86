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
from rlctl.generation.vllm.adapter_layers import EngineAdapters, Slice, slices_of
from rlctl.generation.vllm.param_layout import UnsupportedLayout, record_copies
from rlctl.models.adapters import AdapterSpec
from rlctl.models.layer_kinds import LinearLayer

LOAD_FORMAT, KEY = "rlctl_adapters", "rlctl_adapters"
# Devices on which A lies below its layer's weight. On a CPU vLLM repacks the weight.
folded_on = {"cuda"}
# Tensor cores need a multiple of this many rows.
_ROW_MULTIPLE = 16


def load_arguments(spec: AdapterSpec, load_format: str, folder: str | None) -> dict[str, Any]:
    """Return the arguments by which vLLM loads a model with adapters.

    load_format: that of its weights. folder: PEFT's, of the first adapters; None: they add nothing.
    """
    given = {**asdict(spec), "load_format": load_format, "folder": folder}
    return {"load_format": LOAD_FORMAT, "additional_config": {KEY: given}}


def installed(model: torch.nn.Module) -> EngineAdapters | None:
    """Return the adapters of a loaded model, None without.

    The module of vLLM's workers imports this one, which registers the loader in their processes.
    """
    return model.__dict__.get("rl_adapters")


@register_model_loader(LOAD_FORMAT)
class AdapterModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads a model as vLLM does, and gives it adapters."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Return the model; its `rl_adapters` are the `EngineAdapters`."""
        given = dict(vllm_config.additional_config[KEY])
        own = get_model_loader(replace(self.load_config, load_format=given.pop("load_format")))
        folder = given.pop("folder")
        targets = tuple(LinearLayer(**each) for each in given.pop("targets"))
        adapters = EngineAdapters(AdapterSpec(**given, targets=targets))
        load, slices = own.load_weights, list[tuple[str, Slice]]()

        def load_weights(model: torch.nn.Module, config: Any) -> None:
            load(model, config)
            # Before CPU kernels repack the weights: parameters are then empty.
            slices.extend(_places(model, Path(config.model), adapters.spec))

        own.load_weights = load_weights
        with _rows_for_a(adapters.spec):
            model: torch.nn.Module = own.load_model(vllm_config, model_config, prefix)
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


def _places(model: torch.nn.Module, folder: Path, spec: AdapterSpec) -> list[tuple[str, Slice]]:
    """Return the places of all targets, by the copies that the model's own loaders make. Raises ModelError."""
    names = _names_on_disk(folder, spec)
    hollow = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, (_, _, _, shape) in names.items()}
    try:
        regions = record_copies(model, hollow)
    except UnsupportedLayout as error:
        raise ModelError(f"lora: vLLM does more than copy the weights of targets: {error}") from error
    return slices_of(model, regions, {name: where[:3] for name, where in names.items()})


def _names_on_disk(folder: Path, spec: AdapterSpec) -> Mapping[str, tuple[str, int, int, tuple[int, ...]]]:
    """Return by a weight's name on disk: its target, the row and column where it begins there, and its shape."""
    from rlctl.models.facts import has_weights
    from rlctl.models.weight_headers import weight_headers

    plain = {f"{each.name}.weight": (each.name, 0, 0, (each.outputs, each.inputs)) for each in spec.targets}
    if not has_weights(folder):
        return plain
    headers = weight_headers(folder)
    if all(name in headers for name in plain):
        return plain
    from rlctl.models.meta_model import causal_lm
    from rlctl.models.parameter_table import derive_table

    table = derive_table(causal_lm(folder), {n: (d, tuple(s)) for n, (d, s) in headers.items()}, folder)
    rows = [(each.name, row) for each in spec.targets for row in table.rows_of(f"{each.name}.weight")]
    return {row.name: (target, row.start[0], row.start[1], row.shape) for target, row in rows}


@contextmanager
def _rows_for_a(spec: AdapterSpec) -> Iterator[None]:
    """Have linear layers that are built meanwhile hold rows for A below their weight, in one memory.

    On devices of `folded_on` alone. Made before weights are loaded, layer by layer: a second memory for each loaded
    weight would double what vLLM reserves.
    """
    create = UnquantizedLinearMethod.create_weights

    def create_weights(method: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        create(method, layer, *args, **kwargs)
        weight = layer.weight
        if weight.device.type not in folded_on:
            return
        parts = kwargs.get("output_partition_sizes", args[1] if len(args) > 1 else [0])
        further = -(-spec.rank * len(parts) // _ROW_MULTIPLE) * _ROW_MULTIPLE
        rows, columns = weight.shape
        whole = torch.zeros(rows + further, columns, dtype=weight.dtype, device=weight.device)
        layer.register_buffer("rl_weight", whole, persistent=False)
        weight.data = layer.rl_weight[:rows]

    UnquantizedLinearMethod.create_weights = create_weights
    try:
        yield
    finally:
        UnquantizedLinearMethod.create_weights = create
