"""Float32 passes of a bfloat16 FSDP policy: only the weights are rounded to bfloat16, not the activations.

Their log-probs show how much the rounding of activations changes the policy's log-probs.
"""

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
    """Let the policy compute in float32 within the block, without compiled code.

    The weights have the values of a bfloat16 pass. Each layer's weights are converted only while the layer runs,
    because a whole model in float32 may not fit the device.
    """
    facts = policy.facts
    lm = policy.lm
    layers = list(lm.get_submodule(facts.layers))
    # Modules that the last loop skips: layers, which the loop before handles, and the head, whose weight
    # `chunked_log_probs` converts.
    converted_ids = {id(lm.get_submodule(facts.head))}
    for layer in layers:
        converted_ids.update(id(module) for module in layer.modules())
    embedding = lm.get_submodule(facts.embedding)
    # A single rank has float32 master weights here, which must be rounded first. With several ranks FSDP gathers
    # weights that are rounded already.
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
    """Arguments of a layer's last call, before FSDP rounds them."""

    def keep(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Store the arguments of a call. This is a forward pre-hook."""
        self.args = args
        self.kwargs = kwargs


class _Rounded(NamedTuple):
    """Parameters whose values a normal pass rounds to `dtype`."""

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
    """Return a module's output, computed in float32. parts: the modules whose parameters are converted for the call.

    exact_input: arguments to use instead of `args` and `kwargs`, which FSDP may have rounded.
    """
    if exact_input:
        args = exact_input.args
        kwargs = exact_input.kwargs
    args, kwargs = tree_map(_to_float32, (args, kwargs))
    with _convert_modules(parts, rounded):
        # Call the method of the class, because the `forward` of the instance is compiled.
        return tree_map(_to_float32, type(module).forward(module, *args, **kwargs))


def _look_up(embedding: nn.Module, tokens: Tensor) -> Any:
    """Return the float32 embeddings of `tokens`, computed by the module's `forward`, because some models scale them.

    Only the embedding rows of these tokens are converted to float32.
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
    """Replace the `forward` of `module` within the block. FSDP's hooks still run around the new `forward`."""
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
    """Replace the modules' parameters and buffers by float32 copies within the block.

    Parameters in `rounded` are rounded first, as in a normal pass. Buffers are rounded already and converted too:
    minimax computes a decay from a buffer, which in bfloat16 changed log-probs by 0.001 nats.
    """
    with ExitStack() as stack:
        for part in parts:
            for name, buffer in list(part._buffers.items()):
                if buffer is not None and buffer.is_floating_point() and buffer.dtype != torch.float32:
                    stack.callback(part._buffers.__setitem__, name, buffer)
                    part._buffers[name] = buffer.float()
            for name, parameter in list(part._parameters.items()):
                # A DTensor belongs to an FSDP group of float32 parameters, which is still sharded and needs no copy.
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
