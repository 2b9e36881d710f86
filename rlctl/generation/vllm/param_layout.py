"""Layout of the engine's weights: which part of a checkpoint's tensor is in which part of a live weight.

vLLM has separate loaders for every architecture and parallel layout (fused projections, expert stacks, slices of a
tensor-parallel rank, replicated heads). All loaders end in plain copies. This module makes them load empty tensors, and
records the copies instead of making them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlctl.models.hf_folder import WeightFiles
from rlctl.refit.param_slices import ParamSlice
from rlctl.refit.refit_plan import RefitPlan, TensorSlice

# Attributes of a module that are not searched for weights: torch's registries, and the key-value cache of attention.
_NO_WEIGHTS = ("_parameters", "_buffers", "_modules", "kv_cache")


class UnsupportedLayout(RuntimeError):
    """The engine's loader does more than copy, so new weights must go through the loader. It is raised or returned."""

    # True if the loader may write directly into the live weights.
    in_place = False


def find_regions(runner: Any, plan: RefitPlan, device: torch.device) -> list[ParamSlice] | UnsupportedLayout:
    """Return the regions of the live weights for every tensor of the plan, or the reason why there are none.

    runner: vLLM's model runner, which must still have the weights that it loaded at start-up.
    """
    if device.type == "cpu":
        return UnsupportedLayout("on CPU vLLM repacks its weights")
    model = runner.get_model()
    files = None
    if runner.load_config.load_format != "dummy":
        files = WeightFiles(Path(runner.model_config.model))
    try:
        regions = record_regions(model, plan)
        if files:
            prove(regions, files)
    except UnsupportedLayout as reason:
        reason.in_place = files is not None and loads_in_place(model, files, [tensor.name for tensor in plan.entries])
        return reason
    return regions


def record_regions(model: Any, plan: RefitPlan) -> list[ParamSlice]:
    """Return the regions of `model`'s weights for every tensor of the plan, without loading anything.

    model: a module with vLLM's `load_weights`. Raises UnsupportedLayout if a loader transforms a tensor.
    """
    hollow = {
        tensor.name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        for tensor in plan.entries
    }
    return record_copies(model, hollow)


def record_copies(model: Any, hollow: Mapping[str, Tensor]) -> list[ParamSlice]:
    """Return the regions of `model`'s weights into which its `load_weights` copies the tensors of `hollow`.

    hollow: name -> empty tensor on the meta device. Raises UnsupportedLayout if a loader transforms a tensor.
    """
    recorder = _Recorder(hollow)
    try:
        with torch.no_grad(), recorder:
            model.load_weights(iter(hollow.items()))
    except UnsupportedLayout:
        raise
    except Exception as error:
        raise UnsupportedLayout(f"{type(error).__name__}: {error}") from error
    return recorder.regions


def prove(regions: list[ParamSlice], files: WeightFiles) -> None:
    """Compare the engine's weights with the loaded files bit by bit, for one tensor of each kind (see `_kind`).

    The recorded copies do not show if a model rearranges weights after loading. Raises UnsupportedLayout if it does.
    """
    kinds = {_kind(region.box.name): region for region in regions}
    for region in kinds.values():
        stored = files.tensor(region.box.name)[region.box.slices()]
        if not torch.equal(region.view, stored.to(region.view.device, region.view.dtype)):
            raise UnsupportedLayout(f"vLLM rearranges {region.box.name} after loading it")


def loads_in_place(model: Any, files: WeightFiles, names: Iterable[str]) -> bool:
    """Return True if the engine's loader may write into live weights: loading `files` again would not change them.

    names: the plan's tensors. One tensor of each kind is tried, and nothing is written. Returns False for a model that
    rearranges weights after loading, and for a loader that makes no plain copies into parameters.
    """
    for name in {_kind(name): name for name in names}.values():
        comparer = _Comparer(model)
        try:
            with torch.no_grad(), comparer:
                model.load_weights(iter([(name, files.tensor(name))]))
        except Exception:  # the loader needs several tensors at a time, or the folder lacks the name
            return False
        if not comparer.has_copied or comparer.has_differed:
            return False
    return True


def _kind(name: str) -> str:
    """Return a tensor's name with * for the numbers of its layer and expert: equal for all tensors of one kind."""
    return re.sub(r"\d+", "*", name)


def list_unregistered(model: torch.nn.Module) -> list[str]:
    """Return the names of device tensors that are neither parameters nor buffers of a module, nor key-value caches.

    No refit writes these tensors, and vLLM does not keep them when it drops an engine's weights.
    """
    return [name for name, tensor in _iterate_unregistered(model) if tensor.device.type != "cpu"]


def live_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return all tensors of the model's modules by name: parameters, buffers and others, except key-value caches.

    The name of a tensor that is no parameter ends with a word in brackets.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for name, tensor in model.named_buffers():
        tensors[f"{name} (buffer)"] = tensor
    for number, (name, tensor) in enumerate(_iterate_unregistered(model)):
        tensors[f"{name} ({number})"] = tensor
    return {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}


def _iterate_unregistered(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the tensors in modules' attributes that share no storage with parameters or buffers."""
    registered = {tensor.untyped_storage().data_ptr() for tensor in chain(model.parameters(), model.buffers())}
    for module_name, module in model.named_modules():
        for attribute_name, attribute in vars(module).items():
            if attribute_name in _NO_WEIGHTS:
                continue
            for tensor in _iterate_tensors(attribute):
                if tensor.numel() and tensor.untyped_storage().data_ptr() not in registered:
                    yield f"{module_name}.{attribute_name}".lstrip("."), tensor


def _iterate_tensors(attribute: Any, *, in_objects: bool = True) -> Iterator[Tensor]:
    """Yield the attribute if it is a tensor, else the tensors in it if it is a list, tuple or dict.

    in_objects: also search the attributes of other objects, except modules.
    """
    if isinstance(attribute, Tensor):
        yield attribute
    elif isinstance(attribute, (list, tuple)):
        yield from (member for member in attribute if isinstance(member, Tensor))
    elif isinstance(attribute, dict):
        yield from (member for member in attribute.values() if isinstance(member, Tensor))
    elif in_objects and hasattr(attribute, "__dict__") and not isinstance(attribute, (torch.nn.Module, type)):
        for name, member in vars(attribute).items():
            if name not in _NO_WEIGHTS:
                yield from _iterate_tensors(member, in_objects=False)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each copy from an empty (meta) tensor to a real one, instead of copying."""

    def __init__(self, hollow: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.regions: list[ParamSlice] = []
        # Storage -> (name, tensor). A view shares the storage of its tensor, also on the meta device.
        self._by_storage = {tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in hollow.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target = args[0]
            source = args[1]
            if source.device.type == "meta" and target.device.type != "meta":
                self._record_copy(target, source)
                return target
        return func(*args, **(kwargs or {}))

    def _record_copy(self, target: Tensor, source: Tensor) -> None:
        storage = source.untyped_storage()._cdata
        if storage not in self._by_storage:
            raise UnsupportedLayout("a tensor is computed with before it is copied")
        name, tensor = self._by_storage[storage]
        if target.shape != source.shape or _relevant_strides(source) != _relevant_strides(tensor, source.shape):
            raise UnsupportedLayout(f"{name} is rearranged: {tuple(tensor.shape)} into {tuple(target.shape)}")
        # The offset of the source within the whole tensor gives the first index in each dimension.
        offset = source.storage_offset()
        start = []
        for stride in tensor.stride():
            start.append(offset // stride if stride else 0)
            offset %= stride or 1
        self.regions.append(ParamSlice(TensorSlice(name, tuple(start), tuple(source.shape)), target.detach()))


class _Comparer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compares the source of each copy into a parameter with the parameter's present values, instead of copying."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        # True if any copy had a parameter as its target; True if any copy would have changed a parameter.
        self.has_copied = False
        self.has_differed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].untyped_storage().data_ptr() in self._live:
            target = args[0]
            source = args[1]
            self.has_copied = True
            self.has_differed |= not torch.equal(target, source.to(target.device, target.dtype).expand_as(target))
            return target
        return func(*args, **(kwargs or {}))


def _relevant_strides(tensor: Tensor, shape: torch.Size | None = None) -> tuple[int, ...]:
    """Return a tensor's strides, without those of dimensions of size 1. shape: used instead of the tensor's."""
    return tuple(stride for stride, size in zip(tensor.stride(), shape or tensor.shape) if size > 1)
