"""Layout of tensors in an engine, found by watching its own loader load tensors that hold nothing.

vLLM has separate loaders for every architecture and parallel layout (fused projections, expert stacks, slices of a
tensor-parallel rank, replicated heads). They end in plain copies, which are recorded here instead of made.
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

# Attributes of a module that are not its weights: those registered by torch, and those that vLLM binds to attention.
_NO_WEIGHTS = ("_parameters", "_buffers", "_modules", "kv_cache")


class UnsupportedLayout(RuntimeError):
    """The engine's loader does more than copy: weights must go through it."""

    # True if it may write into the live weights.
    in_place = False


def find_regions(runner: Any, plan: RefitPlan, device: torch.device) -> list[ParamSlice] | UnsupportedLayout:
    """Return the regions of every tensor of the plan, or why there are none. runner: vLLM's, as after start-up."""
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
    """Return the regions of every tensor of the plan in `model` (a module with vLLM's `load_weights`); load nothing.

    Raises UnsupportedLayout if a loader transforms a tensor.
    """
    hollow = {
        tensor.name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        for tensor in plan.entries
    }
    return record_copies(model, hollow)


def record_copies(model: Any, hollow: Mapping[str, Tensor]) -> list[ParamSlice]:
    """Return the place in `model` of each tensor of `hollow`, which are on the meta device. Raises as above."""
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
    """Compare an engine's weights with the files that it loaded, one tensor of each kind, bit by bit.

    A model may rearrange weights after its loaders are through; the recorded copies cannot show this. Raises
    UnsupportedLayout.
    """
    kinds = {_kind(region.box.name): region for region in regions}
    for region in kinds.values():
        stored = files.tensor(region.box.name)[region.box.slices()]
        if not torch.equal(region.view, stored.to(region.view.device, region.view.dtype)):
            raise UnsupportedLayout(f"vLLM rearranges {region.box.name} after loading it")


def loads_in_place(model: Any, files: WeightFiles, names: Iterable[str]) -> bool:
    """Return True if the engine's loader may write into live weights: from `files` it would write their present values.

    names: of the plan. One tensor of each kind is tried, and nothing is written. False for a model that rearranges
    weights after loading, and for a loader without plain copies into parameters.
    """
    for name in {_kind(name): name for name in names}.values():
        comparer = _Comparer(model)
        try:
            with torch.no_grad(), comparer:
                model.load_weights(iter([(name, files.tensor(name))]))
        except Exception:  # a loader of several tensors at a time, or a name that the folder lacks
            return False
        if not comparer.has_copied or comparer.has_differed:
            return False
    return True


def _kind(name: str) -> str:
    """Return a tensor's name without the numbers of its layer and expert."""
    return re.sub(r"\d+", "*", name)


def list_unregistered(model: torch.nn.Module) -> list[str]:
    """Return the names of device tensors that modules hold neither as parameters nor as buffers; no key-value caches.

    No refit writes them, and vLLM does not keep them where it drops an engine's weights.
    """
    return [name for name, tensor in _iterate_unregistered(model) if tensor.device.type != "cpu"]


def live_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers and other tensors of modules by name, without key-value caches.

    Other names than parameters' end with a word in brackets.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for name, tensor in model.named_buffers():
        tensors[f"{name} (buffer)"] = tensor
    for number, (name, tensor) in enumerate(_iterate_unregistered(model)):
        tensors[f"{name} ({number})"] = tensor
    return {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}


def _iterate_unregistered(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each attribute, in no storage of a parameter or buffer."""
    registered = {tensor.untyped_storage().data_ptr() for tensor in chain(model.parameters(), model.buffers())}
    for module_name, module in model.named_modules():
        for attribute_name, attribute in vars(module).items():
            if attribute_name in _NO_WEIGHTS:
                continue
            for tensor in _iterate_tensors(attribute):
                if tensor.numel() and tensor.untyped_storage().data_ptr() not in registered:
                    yield f"{module_name}.{attribute_name}".lstrip("."), tensor


def _iterate_tensors(attribute: Any, *, in_objects: bool = True) -> Iterator[Tensor]:
    """Yield the attribute if it is a tensor, else the tensors in it. It may be a collection.

    in_objects: it may be an object with attributes, but no module.
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
    """Records each copy from a hollow tensor's memory."""

    def __init__(self, hollow: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.regions: list[ParamSlice] = []
        # A view shares its tensor's storage object, on the meta device too: the storage leads to the tensor.
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
        if target.shape != source.shape or _steps(source) != _steps(tensor, source.shape):
            raise UnsupportedLayout(f"{name} is rearranged: {tuple(tensor.shape)} into {tuple(target.shape)}")
        offset = source.storage_offset()
        start = []
        for stride in tensor.stride():
            start.append(offset // stride if stride else 0)
            offset %= stride or 1
        self.regions.append(ParamSlice(TensorSlice(name, tuple(start), tuple(source.shape)), target.detach()))


class _Comparer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compares copies into parameters with the present values, instead of copying."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        # A copy had a parameter as its target; a copy would have changed one.
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


def _steps(tensor: Tensor, shape: torch.Size | None = None) -> tuple[int, ...]:
    """Return the strides of dimensions longer than 1."""
    return tuple(step for step, size in zip(tensor.stride(), shape or tensor.shape) if size > 1)
