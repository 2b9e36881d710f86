"""One rank computes with casts of its weights: bit for bit as a model in that dtype, with float32 gradients."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlctl.training.fsdp.model import compute_in
from tests.compiled import new_graphs

HALF = torch.bfloat16


class Tied(nn.Module):
    """Two layers of a kind, a tied output, and a scale that stays float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.scale = nn.Parameter(torch.full((8,), 1.001))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.recomputes = False

    def forward(self, tokens: Tensor, factor: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * factor
        for layer in self.layers:
            hidden = hidden + (checkpoint(layer, hidden, use_reentrant=False) if self.recomputes else layer(hidden))
        return self.head((hidden * self.scale).to(hidden.dtype))


def example() -> tuple[Tied, Tensor, Tensor]:
    torch.manual_seed(0)
    return Tied(), torch.arange(7) % 11, torch.rand(7, 1)


def cast(model: Tied) -> Tied:
    for layer in model.layers:
        compute_in(layer, HALF, set())
    compute_in(model, HALF, {model.scale, *model.layers.parameters()})
    return model


def gradients(model: nn.Module, tokens: Tensor, factor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(tokens, factor)
    (out.float().square().sum() / 7).backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recomputes", [False, True])
def test_results_are_those_of_a_model_in_the_dtype_and_gradients_are_float32(recomputes: bool) -> None:
    model, tokens, factor = example()
    plain = copy.deepcopy(model)
    plain.to(HALF).scale.data = model.scale.detach().clone()
    held = dict(model.named_parameters())
    cast(model).recomputes = recomputes
    (out, found), (expected, wanted) = gradients(model, tokens, factor), gradients(plain, tokens, factor.to(HALF))
    assert out.dtype == HALF and torch.equal(out, expected)
    assert found.keys() == wanted.keys() == held.keys()
    for name, gradient in wanted.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], gradient.float()), name
    # Parameters are in their places again, and a second pass adds up in float32.
    assert all(each is held[name] for name, each in model.named_parameters())
    once = {name: gradient.clone() for name, gradient in found.items()}
    again = gradients(model, tokens, factor)[1]
    for name, gradient in once.items():
        torch.testing.assert_close(again[name], 2 * gradient, atol=0, rtol=0)


def test_parameters_are_in_their_places_after_an_error() -> None:
    model, tokens, factor = example()
    held = dict(model.named_parameters())
    with pytest.raises(IndexError):
        cast(model)(tokens + 11, factor)
    assert all(each is held[name] for name, each in model.named_parameters())


def test_a_model_in_the_dtype_is_left_alone() -> None:
    model, *_ = example()
    compute_in(model, torch.float32, set())
    assert "forward" not in vars(model)


def test_one_graph_serves_all_layers_and_lengths_and_knows_their_sizes() -> None:
    model, tokens, factor = example()
    torch._dynamo.reset()
    sizes = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        given = (node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder"))
        sizes.extend(tuple(each.shape) for each in given if isinstance(each, Tensor) and each.ndim == 2)
        return graph

    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
    cast(model)

    def work() -> None:
        for length in (7, 5, 3):
            gradients(model, tokens[:length], factor[:length])

    assert new_graphs(work) == 1
    # Weights have constant sizes. Only the input does not.
    assert sorted(all(isinstance(size, int) for size in shape) for shape in sizes) == [False, True, True]
