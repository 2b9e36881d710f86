"""Lets Megatron-core run without a GPU: its calls to CUDA run on the CPU. With CUDA this module does nothing.

`torch.cuda` is patched for the whole process, so only trainer processes use this module. A TorchFunctionMode affects
only one thread, so `start` must run on the thread that trains. `stop` undoes all patches.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlctl.training.update import gradient_norm

CPU = torch.device("cpu")


class Emulation:
    """Patches of torch and Megatron-core that send calls for the device "cuda" to the CPU, from `start` to `stop`."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def start(self) -> None:
        """Apply the patches, unless CUDA is available."""
        if torch.cuda.is_available():
            return
        from megatron.core.optimizer import clip_grads
        from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
        from megatron.core.tensor_parallel import random as megatron_random

        mode = _CudaToCpu()
        self._replace(torch.cuda, _CUDA)
        self._replace(torch.cuda.nvtx, {"range_push": _do_nothing, "range_pop": _do_nothing})
        generator = {"_get_cuda_rng_state": _get_rng_state, "_set_cuda_rng_state": _set_rng_state}
        self._replace(megatron_random, generator)
        self._replace(dist, {"all_to_all_single": _convert_split_sizes(dist.all_to_all_single)})
        self._replace(clip_grads, {"l2_norm_impl": _l2_norm})
        split_groups = HybridDeviceOptimizer._get_sub_optimizer_param_groups
        self._replace(HybridDeviceOptimizer, {"_get_sub_optimizer_param_groups": _claim_device(mode, split_groups)})
        self._undo.enter_context(mode)

    def stop(self) -> None:
        """Undo the patches. Must run on the thread that called `start`."""
        self._undo.close()

    def _replace(self, owner: Any, attributes: dict[str, Any]) -> None:
        for name, replacement in attributes.items():
            self._undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)


class _CudaToCpu(TorchFunctionMode):
    """Torch function mode that makes tensors on the CPU when a caller asks for a GPU.

    Tensors in `on_device` also report `is_cuda` as true.
    """

    def __init__(self) -> None:
        super().__init__()
        # id of a tensor -> the tensor, if its `is_cuda` is reported as true. Its copies are added too, except copies
        # made by `Tensor.cpu`.
        self.on_device: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.pin_memory:
            return args[0].clone()
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return str(func(args[0])).replace("torch.", "torch.cuda.", 1)
        if self.on_device and func in _OF_DEVICES:
            return self._call_for_device(func, args, kwargs)
        if _is_cuda(kwargs.get("device")) or kwargs.get("pin_memory"):
            kwargs = {name: argument for name, argument in kwargs.items() if name != "pin_memory"}
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)

    def _call_for_device(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_on_device = id(args[0]) in self.on_device
        if func == _IS_CUDA:
            return is_on_device
        if func is torch.Tensor.cpu:
            return args[0].clone()
        copy = func(*args, **kwargs)
        if is_on_device:
            self.on_device[id(copy)] = copy
        return copy


_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_OF_DEVICES = (_IS_CUDA, torch.Tensor.cpu, torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _InertObject:
    """Stand-in for a CUDA stream or event. Every method does nothing and returns the object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., "_InertObject"]:
        return lambda *args, **kwargs: self


def _l2_norm(chunk: int, overflow: Tensor, gradients: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """Stand-in for Megatron's `l2_norm_impl`: return the 2-norm of all gradients together, float32 [1], and None."""
    return gradient_norm(gradients[0]).float().view(1), None


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


_CUDA: dict[str, Any] = {
    "current_device": lambda: CPU,
    "synchronize": _do_nothing,
    "current_stream": _InertObject,
    "stream": lambda stream: contextlib.nullcontext(),
    "Stream": _InertObject,
    "Event": _InertObject,
    "manual_seed": torch.default_generator.manual_seed,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
}


def _convert_split_sizes(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `all_to_all_single` so that its split sizes are lists of int.

    Megatron converts only split sizes on a GPU, and passes those on the CPU as tensors, which torch refuses.
    """

    def all_to_all_single(output: Tensor, input: Tensor, *split_sizes: Any, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if name in kwargs:
                kwargs[name] = _to_numbers(kwargs[name])
        return exchange(output, input, *map(_to_numbers, split_sizes), **kwargs)

    return all_to_all_single


def _to_numbers(sizes: Any) -> Any:
    if isinstance(sizes, Tensor):
        return sizes.tolist()
    return [int(size) for size in sizes] if isinstance(sizes, Iterable) else sizes


def _claim_device(mode: _CudaToCpu, split_groups: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function by which HybridDeviceOptimizer chooses parameters to offload to the host.

    During the call every parameter reports `is_cuda` as true, because the function offloads parameters of a GPU only.
    """

    def split_as_if_on_device(optimizer: Any, fraction: float) -> Any:
        for group in optimizer.param_groups:
            mode.on_device.update((id(parameter), parameter) for parameter in group["params"])
        try:
            return split_groups(optimizer, fraction)
        finally:
            mode.on_device = {}

    return split_as_if_on_device
