"""`chunked_log_probs` equals log-probs from all logits at once in float64, and stores at most one chunk of logits."""

import shutil
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlctl.models.observed_facts import observe
from rlctl.training.logprobs import chunked_log_probs
from tests.compiled import new_graphs


def naive_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target, and the entropy at each row, computed from all logits at once."""
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def make_example(rows: int = 23, hidden: int = 16, vocab: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, hidden), torch.randn(vocab, hidden), torch.randint(0, vocab, (rows,))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 7, 23, 100])
@pytest.mark.parametrize("use", ["log_probs", "entropy", "both"])
def test_values_and_gradients_equal_the_naive_ones(temperature: float, chunk: int, use: str) -> None:
    hidden, weight, targets = make_example()
    coefficients = {"log_probs": (1.0, 0.0), "entropy": (0.0, 1.0), "both": (1.0, -0.7)}[use]
    factor = torch.randn(len(hidden), dtype=torch.float64)

    def add_gradients(inputs: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor]) -> list[Tensor]:
        weighted = zip(coefficients, outputs)
        terms = [coefficient * (output * factor).sum() for coefficient, output in weighted if coefficient]
        return [*outputs, *torch.autograd.grad(sum(terms), inputs)]

    exact_hidden = hidden.double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    exact_outputs = naive_log_probs(exact_hidden, exact_weight, targets, temperature)
    expected_tensors = add_gradients((exact_hidden, exact_weight), exact_outputs)
    hidden.requires_grad_()
    weight.requires_grad_()
    outputs = chunked_log_probs(hidden, weight, targets, temperature, chunk)
    for tensor, expected in zip(add_gradients((hidden, weight), outputs), expected_tensors):
        torch.testing.assert_close(tensor.double(), expected, atol=2e-5, rtol=1e-5)


# One model family for each function that transforms logits, and one whose head has a bias.
HEADS: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 4.0},
    "cohere2": {"logit_scale": 0.3, "layer_types": ["full_attention"]},
    "gemma2": {"final_logit_softcapping": 3.0, "head_dim": 16, "layer_types": ["full_attention"]},
    "phi": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_and_gradients_are_those_of_the_models_own_logits(family: str, dtype: torch.dtype) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model(family, **sizes, **heads, **HEADS[family])
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    head = lm.get_output_embeddings()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens, targets = torch.randint(1, 50, (2, 11)).unbind()
    factor = torch.randn(11)

    def run_backward(log_probs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
        ((log_probs - 0.7 * entropy) * factor).sum().backward()
        gradients = {}
        for name, parameter in lm.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.float()
        lm.zero_grad()
        return gradients

    log_p = lm(input_ids=tokens[None], use_cache=False).logits[0].float().div(0.8).log_softmax(-1)
    expected_log_probs = log_p.gather(1, targets[:, None])[:, 0]
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    hidden = lm.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    log_probs, entropy = chunked_log_probs(
        hidden, head.weight, targets, 0.8, 4, bias=head.bias, transform=observe(config).logits
    )
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(log_probs, expected_log_probs, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(entropy, expected_entropy, atol=tolerance, rtol=tolerance)
    expected_gradients = run_backward(expected_log_probs, expected_entropy)
    gradients = run_backward(log_probs, entropy)
    assert gradients.keys() == expected_gradients.keys()
    assert family != "phi" or "lm_head.bias" in gradients
    for name, gradient in gradients.items():
        expected = expected_gradients[name]
        largest = float(expected.abs().max())
        torch.testing.assert_close(gradient, expected, atol=tolerance * largest, rtol=tolerance)


def test_the_chunk_size_does_not_change_the_values() -> None:
    hidden, weight, targets = make_example()
    expected_log_probs, expected_entropy = chunked_log_probs(hidden, weight, targets, 1.0, 100)
    log_probs, entropy = chunked_log_probs(hidden, weight, targets, 1.0, 5)
    torch.testing.assert_close(log_probs, expected_log_probs, atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-6, rtol=0)


def test_an_impossible_token_and_a_certain_one_have_finite_gradients() -> None:
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[1000.0], [0.0]], requires_grad=True)
    log_probs, entropy = chunked_log_probs(hidden, weight, torch.tensor([0, 1]), 1.0, 2)
    (log_probs + entropy).sum().backward()
    assert log_probs.tolist() == [0.0, -1000.0] and entropy.tolist() == [0.0, 0.0]
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_no_rows_give_zero_gradients_not_missing_ones() -> None:
    hidden, weight, _ = make_example()
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs, entropy = chunked_log_probs(hidden[:0], weight, torch.empty(0, dtype=torch.long), 1.0, 4)
    (log_probs.sum() + entropy.sum()).backward()
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize(("kept_rows", "remade_chunks"), [(0, 5), (4, 4), (5, 4), (12, 3), (100, 0)])
def test_kept_logits_are_not_made_twice_and_change_no_bit(kept_rows: int, remade_chunks: int) -> None:
    # Five chunks, the last of which has three rows.
    passes = []
    for rows in (0, kept_rows):
        hidden, weight, targets = make_example()
        hidden.requires_grad_(), weight.requires_grad_()
        log_probs, entropy = chunked_log_probs(hidden, weight, targets, 0.7, 5, kept_rows=rows)
        with Products() as products:
            (log_probs - entropy).sum().backward()
        passes.append((log_probs, entropy, hidden.grad, weight.grad))
    # The gradients of each chunk take two products.
    assert len(products.results) == 10 + remade_chunks
    for tensor_without_kept_rows, tensor in zip(*passes):
        assert torch.equal(tensor, tensor_without_kept_rows)


class Products(TorchDispatchMode):
    """Counts matrix products, and the largest number of products that were alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[weakref.ref[Tensor]] = []
        self.alive = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.results.append(weakref.ref(out))
            self.alive = max(self.alive, sum(result() is not None for result in self.results))
        return out


@pytest.mark.parametrize(("gradient", "alive"), [(False, 1), (True, 5)])
def test_logits_are_kept_for_a_backward_pass_alone(gradient: bool, alive: int) -> None:
    hidden, weight, targets = make_example()
    weight.requires_grad_()
    with torch.set_grad_enabled(gradient), Products() as products:
        chunked_log_probs(hidden, weight, targets, 1.0, 5, kept_rows=100)
    assert products.alive == alive


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    chunk = 16
    vocab = 500
    hidden, weight, targets = make_example(rows=256, hidden=4, vocab=vocab)

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.numel = max(self.numel, out.numel())
            return out

    hidden.requires_grad_(), weight.requires_grad_()
    with Largest() as largest:
        log_probs, entropy = chunked_log_probs(hidden, weight, targets, 1.0, chunk)
        (log_probs.sum() + entropy.sum()).backward()
    assert largest.numel == chunk * vocab


@pytest.mark.parametrize("rows", [7, 0])
def test_a_frozen_head_has_no_gradient_and_costs_no_memory_for_one(rows: int) -> None:
    hidden, weight, targets = make_example(8, 4, 500)
    bias = torch.zeros(500)
    shapes = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            # A view of the weight costs no memory.
            if isinstance(out, Tensor) and out.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
                shapes.append(out.shape)
            return out

    gradients = []
    for is_trained in (True, False):
        leaf = hidden.clone().requires_grad_()
        weight.requires_grad_(is_trained)
        with Shapes():
            log_probs, entropy = chunked_log_probs(leaf[:rows], weight, targets[:rows], 1.0, 4, bias=bias)
            (log_probs.sum() + entropy.sum()).backward()
        assert (weight.shape in shapes) == is_trained
        shapes.clear()
        gradients.append(leaf.grad)
        assert (weight.grad is not None) == is_trained and bias.grad is None
        weight.grad = None
    torch.testing.assert_close(*gradients, atol=0, rtol=0)


@pytest.mark.long  # The test runs torch.compile.
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_pack_of_one_chunk_and_one_of_several_share_what_is_compiled() -> None:
    """Without shared graphs, the step with the first pack of the other kind took 10 s more to compile."""
    hidden, weight, targets = make_example(40)

    def run_pack(rows: int) -> None:
        hidden_of_pack = hidden[:rows].clone().requires_grad_()
        trained_weight = weight.clone().requires_grad_()
        log_probs, entropy = chunked_log_probs(
            hidden_of_pack, trained_weight, targets[:rows].clone(), 1.0, 8, compiled=True
        )
        (log_probs + entropy).sum().backward()

    def count_new_graphs(rows: int) -> int:
        return new_graphs(lambda: run_pack(rows))

    torch.compiler.reset()
    assert count_new_graphs(21) > 0
    assert [count_new_graphs(rows) for rows in (40, 7, 8, 16, 3)] == [0, 0, 0, 0, 0]
    torch.compiler.reset()
    assert count_new_graphs(5) > 0
    assert [count_new_graphs(rows) for rows in (6, 21, 40)] == [0, 0, 0]
