"""Tensors that an engine's modules hold besides parameters and buffers are found, for vLLM drops them at level 2."""

from types import SimpleNamespace

import torch

from rlctl.generation.vllm.param_layout import unregistered


def on_a_device() -> torch.Tensor:
    return torch.empty(2, device="meta")


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.ones(1))
        self.alias = self.weight.detach()
        self.on_the_host = torch.ones(1)
        self.kv_cache = [on_a_device()]
        self.backend = SimpleNamespace(kv_cache=on_a_device(), kind="flash", dtype=torch.float32)


def model() -> torch.nn.Module:
    return torch.nn.ModuleDict({"one": Attention(), "two": Attention()})


def test_parameters_buffers_caches_and_tensors_on_the_host_are_none() -> None:
    assert unregistered(model()) == []


def test_others_are_named_wherever_a_module_holds_them() -> None:
    tried = model()
    tried.one.slopes = on_a_device()
    tried.one.experts = {"map": on_a_device()}
    tried.two.backend.sinks = [on_a_device()]
    assert unregistered(tried) == ["one.slopes", "one.experts", "two.backend"]
