"""A pass of an FSDP policy in float32 with the weights that bfloat16 rounded: the measure of the other rounding."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from rlctl.training.fsdp.model import FsdpPolicy


@contextmanager
def in_float32(policy: FsdpPolicy) -> Iterator[None]:
    """Have the policy compute in float32 within the block, without compiled code.

    The weights are those of a pass in bfloat16. A layer's weights are converted while it runs: a whole model in float32
    may not fit the device.
    """
    facts, lm = policy.facts, policy.lm
    layers = list(lm.get_submodule(facts.layers))
    # The head converts its weight by itself.
    done = {id(module) for layer in layers for module in layer.modules()} | {id(lm.get_submodule(facts.head))}
    embedding = lm.get_submodule(facts.embedding)
    # A rank alone has float32 masters here. Others have gathered weights, rounded already.
    rounded = _Rounded(policy.dtype, {each for name, each in lm.named_parameters() if not facts.keeps_float32(name)})
    with ExitStack() as stack:
        for name, value in (("compiled", False), ("dtype", torch.float32)):
            stack.callback(setattr, policy, name, getattr(policy, name))
            setattr(policy, name, value)
        for layer in layers:
            given = _Given()
            hook = layer.register_forward_pre_hook(given.keep, prepend=True, with_kwargs=True)
            stack.callback(hook.remove)
            stack.enter_context(
                _replaced(layer, partial(_forward_in_float32, layer, list(layer.modules()), given, rounded))
            )
        for module in lm.modules():
            if id(module) not in done and (module._parameters or module._buffers):
                look = partial(_look_up, module) if module is embedding else None
                stack.enter_context(
                    _replaced(module, look or partial(_forward_in_float32, module, [module], None, rounded))
                )
        yield


class _Given:
    """Arguments of a layer before FSDP rounds them."""

    def keep(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep them; a hook."""
        self.args, self.kwargs = args, kwargs


class _Rounded(NamedTuple):
    """Parameters whose values a pass rounds to a dtype."""

    dtype: torch.dtype
    parameters: set[nn.Parameter]


def _forward_in_float32(
    module: nn.Module,
    parts: Sequence[nn.Module],
    given: _Given | None,
    rounded: _Rounded,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return a module's output, computed in float32. parts: modules whose parameters are converted."""
    if given:
        args, kwargs = given.args, given.kwargs
    args, kwargs = tree_map(_float, (args, kwargs))
    with _converted_modules(parts, rounded):
        # The class's: an instance's is compiled.
        return tree_map(_float, type(module).forward(module, *args, **kwargs))


def _look_up(embedding: nn.Module, tokens: Tensor) -> Any:
    """Return an embedding's output, computed in float32: some scale it. Only the rows of these tokens are converted."""
    weight = embedding._parameters["weight"]
    assert weight is not None
    unique: Any = torch.unique
    used, place = unique(tokens, return_inverse=True)
    embedding._parameters["weight"] = nn.Parameter(weight.detach()[used].float(), requires_grad=False)
    try:
        return type(embedding).forward(embedding, place)
    finally:
        embedding._parameters["weight"] = weight


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give `module` another `forward`, below FSDP's own work, within the block."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


@contextmanager
def _converted_modules(parts: Sequence[nn.Module], rounded: _Rounded) -> Iterator[None]:
    """Have float32 copies of the modules' parameters, as a pass rounds them, in their places within the block.

    Buffers are rounded already. A decay that minimax computes from one in bfloat16 was 0.001 nats off.
    """
    with ExitStack() as stack:
        for part in parts:
            for name, buffer in list(part._buffers.items()):
                if buffer is not None and buffer.is_floating_point() and buffer.dtype != torch.float32:
                    stack.callback(part._buffers.__setitem__, name, buffer)
                    part._buffers[name] = buffer.float()
            for name, parameter in list(part._parameters.items()):
                # Those of a group of its own are still sharded, and float32.
                if parameter is None or isinstance(parameter, DTensor):
                    continue
                value = parameter.detach()
                if parameter in rounded.parameters:
                    value = value.to(rounded.dtype)
                elif value.dtype == torch.float32:
                    continue
                stack.callback(part._parameters.__setitem__, name, parameter)
                part._parameters[name] = nn.Parameter(value.float(), requires_grad=False)
        yield
