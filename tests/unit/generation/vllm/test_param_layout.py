"""Layout of an engine's tensors: those besides parameters and buffers, and loaders that may write into live weights."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from rlctl.generation.vllm.param_layout import list_unregistered, loads_in_place
from rlctl.models.hf_folder import WeightFiles


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
    assert list_unregistered(model()) == []


def test_others_are_named_wherever_a_module_holds_them() -> None:
    tried = model()
    tried.one.slopes = on_a_device()
    tried.one.experts = {"map": on_a_device()}
    tried.two.backend.sinks = [on_a_device()]
    assert list_unregistered(tried) == ["one.slopes", "one.experts", "two.backend"]


class Loaded(torch.nn.Module):
    """As vLLM's gpt_oss: experts are turned and copied without their parameter's own loader."""

    def __init__(self, tensors: dict[str, torch.Tensor], skipped: str = "", turned: bool = False) -> None:
        super().__init__()
        self.experts = torch.nn.Parameter(torch.zeros(2, 4, 3))
        self.sinks = torch.nn.Parameter(torch.zeros(4))
        self.skipped = ""
        self.load_weights(tensors.items())
        self.skipped = skipped
        if turned:
            self.experts.data.copy_(self.experts.flip(1))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                if name != self.skipped:
                    target = self.experts if "experts" in name else self.sinks
                    target.data.copy_(tensor.permute(0, 2, 1).contiguous() if "experts" in name else tensor)


@pytest.mark.parametrize(
    ("options", "right"),
    [({}, True), ({"skipped": "layers.0.sinks"}, False), ({"turned": True}, False)],
    ids=["copies", "ignores a tensor", "rearranges afterwards"],
)
def test_a_loader_may_write_into_live_weights_if_they_hold_what_it_would_write(
    options: dict[str, object], right: bool, tmp_path: Path
) -> None:
    tensors = {"layers.0.experts": torch.randn(2, 3, 4), "layers.0.sinks": torch.randn(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = Loaded(tensors, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    files = WeightFiles(tmp_path)
    assert loads_in_place(model, files, list(tensors)) is right
    assert not loads_in_place(model, files, [*tensors, "layers.0.more"])
    # Nothing was written.
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    tensors["layers.0.sinks"] += 1
    assert not loads_in_place(Loaded(tensors, **options), files, list(tensors))
