"""A single rank casts float32 weights in each pass: outputs equal those of a bfloat16 model, gradients are float32."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlctl.training.fsdp.model import compute_in
from tests.compiled import new_graphs

HALF = torch.bfloat16


class Tied(nn.Module):
    """Model of two equal layers, an output tied to the embedding, and a scale that stays float32."""

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


def make_example() -> tuple[Tied, Tensor, Tensor]:
    torch.manual_seed(0)
    return Tied(), torch.arange(7) % 11, torch.rand(7, 1)


def cast_layers(model: Tied) -> Tied:
    for layer in model.layers:
        compute_in(layer, HALF, set())
    compute_in(model, HALF, {model.scale, *model.layers.parameters()})
    return model


def run_backward(model: nn.Module, tokens: Tensor, factor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output of a model and the gradient of each parameter."""
    output = model(tokens, factor)
    (output.float().square().sum() / 7).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return output.detach(), gradients


@pytest.mark.parametrize("recomputes", [False, True])
def test_results_are_those_of_a_model_in_the_dtype_and_gradients_are_float32(recomputes: bool) -> None:
    model, tokens, factor = make_example()
    plain = copy.deepcopy(model)
    plain.to(HALF).scale.data = model.scale.detach().clone()
    parameters = dict(model.named_parameters())
    cast_layers(model).recomputes = recomputes
    output, gradients = run_backward(model, tokens, factor)
    expected_output, expected_gradients = run_backward(plain, tokens, factor.to(HALF))
    assert output.dtype == HALF and torch.equal(output, expected_output)
    assert gradients.keys() == expected_gradients.keys() == parameters.keys()
    for name, expected in expected_gradients.items():
        assert gradients[name].dtype == torch.float32 and torch.equal(gradients[name], expected.float()), name
    # The modules have their float32 parameters again, and a second pass adds to their gradients in float32.
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    first_gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    _, summed_gradients = run_backward(model, tokens, factor)
    for name, gradient in first_gradients.items():
        torch.testing.assert_close(summed_gradients[name], 2 * gradient, atol=0, rtol=0)


def test_parameters_are_in_their_places_after_an_error() -> None:
    model, tokens, factor = make_example()
    parameters = dict(model.named_parameters())
    with pytest.raises(IndexError):
        cast_layers(model)(tokens + 11, factor)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


def test_a_model_in_the_dtype_is_left_alone() -> None:
    model, *_ = make_example()
    compute_in(model, torch.float32, set())
    assert "forward" not in vars(model)


def test_one_graph_serves_all_layers_and_lengths_and_knows_their_sizes() -> None:
    model, tokens, factor = make_example()
    torch._dynamo.reset()
    matrix_shapes = []

    def note_shapes(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        for node in graph.graph.find_nodes(op="placeholder"):
            example = node.meta["example_value"]
            if isinstance(example, Tensor) and example.ndim == 2:
                matrix_shapes.append(tuple(example.shape))
        return graph

    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=note_shapes)
    cast_layers(model)

    def run_lengths() -> None:
        for length in (7, 5, 3):
            run_backward(model, tokens[:length], factor[:length])

    assert new_graphs(run_lengths) == 1
    # Weights have constant sizes. Only the input does not.
    are_constant = [all(isinstance(size, int) for size in shape) for shape in matrix_shapes]
    assert sorted(are_constant) == [False, True, True]
