"""Chunked log-probs equal the naive ones in float64, and never hold more logits than a chunk."""

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


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def example(rows: int = 23, hidden: int = 16, vocab: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, hidden), torch.randn(vocab, hidden), torch.randint(0, vocab, (rows,))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 7, 23, 100])
@pytest.mark.parametrize("use", ["log_probs", "entropy", "both"])
def test_values_and_gradients_equal_the_naive_ones(temperature: float, chunk: int, use: str) -> None:
    hidden, weight, targets = example()
    weights = {"log_probs": (1.0, 0.0), "entropy": (0.0, 1.0), "both": (1.0, -0.7)}[use]
    factor = torch.randn(len(hidden), dtype=torch.float64)

    def run(h: Tensor, w: Tensor, pair: tuple[Tensor, Tensor]) -> list[Tensor]:
        terms = [c * (value * factor).sum() for c, value in zip(weights, pair) if c]
        return [*pair, *torch.autograd.grad(sum(terms), (h, w))]

    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    expected = run(*exact, naive(*exact, targets, temperature))
    single = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    got = run(*single, chunked_log_probs(*single, targets, temperature, chunk))
    for a, b in zip(got, expected):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=1e-5)


# One family for each function between head and logits, and one whose head has a bias.
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

    def gradients(log_probs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
        ((log_probs - 0.7 * entropy) * factor).sum().backward()
        found = {name: p.grad.float() for name, p in lm.named_parameters() if p.grad is not None}
        lm.zero_grad()
        return found

    log_p = lm(input_ids=tokens[None], use_cache=False).logits[0].float().div(0.8).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    hidden = lm.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    got = chunked_log_probs(
        hidden, head.weight, targets, 0.8, 4, bias=head.bias, transform=observe(config).logits
    )  # fmt: skip
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    wanted, found = gradients(*expected), gradients(*got)
    assert found.keys() == wanted.keys() and (family != "phi" or "lm_head.bias" in found)
    for name, gradient in found.items():
        largest = float(wanted[name].abs().max())
        torch.testing.assert_close(gradient, wanted[name], atol=tolerance * largest, rtol=tolerance)


def test_the_chunk_size_does_not_change_the_values() -> None:
    hidden, weight, targets = example()
    whole = chunked_log_probs(hidden, weight, targets, 1.0, 100)
    for a, b in zip(chunked_log_probs(hidden, weight, targets, 1.0, 5), whole):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_an_impossible_token_and_a_certain_one_have_finite_gradients() -> None:
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[1000.0], [0.0]], requires_grad=True)
    log_probs, entropy = chunked_log_probs(hidden, weight, torch.tensor([0, 1]), 1.0, 2)
    (log_probs + entropy).sum().backward()
    assert log_probs.tolist() == [0.0, -1000.0] and entropy.tolist() == [0.0, 0.0]
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_no_rows_give_zero_gradients_not_missing_ones() -> None:
    hidden, weight, _ = example()
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs, entropy = chunked_log_probs(hidden[:0], weight, torch.empty(0, dtype=torch.long), 1.0, 4)
    (log_probs.sum() + entropy.sum()).backward()
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize(("kept", "again"), [(0, 5), (4, 4), (5, 4), (12, 3), (100, 0)])
def test_kept_logits_are_not_made_twice_and_change_no_bit(kept: int, again: int) -> None:
    # Five chunks, the last of which has three rows.
    found = []
    for rows in (0, kept):
        hidden, weight, targets = example()
        hidden.requires_grad_(), weight.requires_grad_()
        log_probs, entropy = chunked_log_probs(hidden, weight, targets, 0.7, 5, kept_rows=rows)
        with Products() as products:
            (log_probs - entropy).sum().backward()
        found.append((log_probs, entropy, hidden.grad, weight.grad))
    # Two for the gradients of each chunk.
    assert len(products.made) == 10 + again
    for one, other in zip(*found):
        assert torch.equal(one, other)


class Products(TorchDispatchMode):
    """Counts matrix products, and the results that are alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []
        self.alive = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.made.append(weakref.ref(out))
            self.alive = max(self.alive, sum(each() is not None for each in self.made))
        return out


@pytest.mark.parametrize(("gradient", "alive"), [(False, 1), (True, 5)])
def test_logits_are_kept_for_a_backward_pass_alone(gradient: bool, alive: int) -> None:
    hidden, weight, targets = example()
    weight.requires_grad_()
    with torch.set_grad_enabled(gradient), Products() as products:
        chunked_log_probs(hidden, weight, targets, 1.0, 5, kept_rows=100)
    assert products.alive == alive


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    rows, width, vocab, chunk = 256, 4, 500, 16
    hidden, weight, targets = example(rows, width, vocab)

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
    hidden, weight, targets = example(8, 4, 500)
    bias = torch.zeros(500)
    made = []

    class Float32(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            made.extend([out.shape] if isinstance(out, Tensor) else [])
            return out

    gradients = []
    for trained in (True, False):
        own = hidden.clone().requires_grad_()
        weight.requires_grad_(trained)
        with Float32():
            log_probs, entropy = chunked_log_probs(own[:rows], weight, targets[:rows], 1.0, 4, bias=bias)
            (log_probs.sum() + entropy.sum()).backward()
        assert (weight.shape in made) == trained
        made.clear()
        gradients.append(own.grad)
        assert (weight.grad is not None) == trained and bias.grad is None
        weight.grad = None
    torch.testing.assert_close(*gradients, atol=0, rtol=0)


@pytest.mark.long  # compiles
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_pack_of_one_chunk_and_one_of_several_share_what_is_compiled() -> None:
    """Whichever comes later cost a step of a run 10 s."""
    hidden, weight, targets = example(40)

    def work(rows: int) -> None:
        h, w = hidden[:rows].clone().requires_grad_(), weight.clone().requires_grad_()
        log_probs, entropy = chunked_log_probs(h, w, targets[:rows].clone(), 1.0, 8, compiled=True)
        (log_probs + entropy).sum().backward()

    def graphs(rows: int) -> int:
        return new_graphs(lambda: work(rows))

    torch.compiler.reset()
    assert graphs(21) > 0
    assert [graphs(rows) for rows in (40, 7, 8, 16, 3)] == [0] * 5
    torch.compiler.reset()
    assert graphs(5) > 0
    assert [graphs(rows) for rows in (6, 21, 40)] == [0] * 3
