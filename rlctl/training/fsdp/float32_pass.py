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
    facts = policy.facts
    lm = policy.lm
    layers = list(lm.get_submodule(facts.layers))
    # The head converts its weight by itself.
    converted_ids = {id(lm.get_submodule(facts.head))}
    for layer in layers:
        converted_ids.update(id(module) for module in layer.modules())
    embedding = lm.get_submodule(facts.embedding)
    # A rank alone has float32 masters here. Others have gathered weights, rounded already.
    rounded = _Rounded(
        policy.dtype, {parameter for name, parameter in lm.named_parameters() if not facts.keeps_float32(name)}
    )
    with ExitStack() as stack:
        stack.callback(setattr, policy, "compiled", policy.compiled)
        policy.compiled = False
        stack.callback(setattr, policy, "dtype", policy.dtype)
        policy.dtype = torch.float32
        for layer in layers:
            exact_input = _ExactInput()
            hook = layer.register_forward_pre_hook(exact_input.keep, prepend=True, with_kwargs=True)
            stack.callback(hook.remove)
            forward = partial(_forward_in_float32, layer, list(layer.modules()), exact_input, rounded)
            stack.enter_context(_replace_forward(layer, forward))
        for module in lm.modules():
            if id(module) in converted_ids or not (module._parameters or module._buffers):
                continue
            if module is embedding:
                forward = partial(_look_up, module)
            else:
                forward = partial(_forward_in_float32, module, [module], None, rounded)
            stack.enter_context(_replace_forward(module, forward))
        yield


class _ExactInput:
    """Arguments of a layer before FSDP rounds them."""

    def keep(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep the arguments of a call; a hook."""
        self.args = args
        self.kwargs = kwargs


class _Rounded(NamedTuple):
    """Parameters whose values a pass rounds to a dtype."""

    dtype: torch.dtype
    parameters: set[nn.Parameter]


def _forward_in_float32(
    module: nn.Module,
    parts: Sequence[nn.Module],
    exact_input: _ExactInput | None,
    rounded: _Rounded,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return a module's output, computed in float32. parts: modules whose parameters are converted.

    exact_input: replaces the arguments, which FSDP may have rounded.
    """
    if exact_input:
        args = exact_input.args
        kwargs = exact_input.kwargs
    args, kwargs = tree_map(_to_float32, (args, kwargs))
    with _convert_modules(parts, rounded):
        # The method of the class: the instance's own is compiled.
        return tree_map(_to_float32, type(module).forward(module, *args, **kwargs))


def _look_up(embedding: nn.Module, tokens: Tensor) -> Any:
    """Return an embedding's output, computed in float32, since some embeddings scale their output.

    Only the rows of these tokens are converted.
    """
    weight = embedding._parameters["weight"]
    assert weight is not None
    unique: Any = torch.unique
    unique_tokens, row_of_token = unique(tokens, return_inverse=True)
    embedding._parameters["weight"] = nn.Parameter(weight.detach()[unique_tokens].float(), requires_grad=False)
    try:
        return type(embedding).forward(embedding, row_of_token)
    finally:
        embedding._parameters["weight"] = weight


def _to_float32(argument: Any) -> Any:
    return argument.float() if isinstance(argument, Tensor) and argument.is_floating_point() else argument


@contextmanager
def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give `module` another `forward`, below FSDP's own work, within the block."""
    instance_forward = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if instance_forward is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = instance_forward


@contextmanager
def _convert_modules(parts: Sequence[nn.Module], rounded: _Rounded) -> Iterator[None]:
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
                # Parameters of an FSDP group apart are still sharded, and float32.
                if parameter is None or isinstance(parameter, DTensor):
                    continue
                weight = parameter.detach()
                if parameter in rounded.parameters:
                    weight = weight.to(rounded.dtype)
                elif weight.dtype == torch.float32:
                    continue
                stack.callback(part._parameters.__setitem__, name, parameter)
                part._parameters[name] = nn.Parameter(weight.float(), requires_grad=False)
        yield
