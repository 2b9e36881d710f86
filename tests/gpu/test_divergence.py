"""Divergences of two heads of 151,936 tokens in bfloat16: their memory, and their gradients against float32 ones."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.gpu
VOCAB = 151_936
ROWS = 4096
CHUNK = 1024


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def make_side(width: int, seed: int) -> "tuple[Tensor, Tensor]":
    """Return hidden states and the head's weight, whose logits have a standard deviation of about 2."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    hidden = torch.randn(ROWS, width, **options)
    weight = torch.randn(VOCAB, width, **options) * (2 / width**0.5)
    return hidden.requires_grad_(), weight.requires_grad_()


def peak_of(function: Callable[[], Any]) -> float:
    """Return the most bytes that a second run of the function allocates above those before it."""
    import torch

    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.skipif("gpus() < 1", reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_divergence_over_a_large_vocabulary_takes_a_few_chunks_of_logits(compiled: bool) -> None:
    import torch

    from rlctl.models.layer_kinds import LogitTransform
    from rlctl.training.divergence import Divergence, chunked_divergence
    from rlctl.training.logits import OutputHead

    hidden, weight = make_side(1024, seed=1)
    teacher_hidden, teacher_weight = make_side(2560, seed=2)
    teacher_head = OutputHead(teacher_weight, None, LogitTransform())
    divergence = Divergence("reverse_kl", 0.5)

    def run_pass() -> list[Any]:
        head = OutputHead(weight, None, LogitTransform())
        values = chunked_divergence(
            hidden,
            head,
            teacher_hidden,
            teacher_head,
            divergence,
            vocab=VOCAB,
            temperature=1.0,
            chunk=CHUNK,
            compiled=compiled,
        )
        return [values.detach(), *torch.autograd.grad(values.sum(), (hidden, weight))]

    gradient_bytes = weight.numel() * 4 + weight.numel() * 2 + hidden.numel() * 2
    chunk_bytes = CHUNK * VOCAB * 4
    peak = peak_of(run_pass)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    values, grad_hidden, grad_weight = run_pass()
    end.record()
    torch.cuda.synchronize()
    chunks = (peak - gradient_bytes) / chunk_bytes
    print(f"compiled {compiled}: {chunks:.2f} float32 chunks, {start.elapsed_time(end):.0f} ms for {ROWS} tokens")
    # All logits of both would be 8 chunks of float32, before any softmax.
    assert chunks < (3 if compiled else 7)
    rows = slice(0, 64)
    exact_hidden = hidden.detach()[rows].float().requires_grad_()
    log_p = (exact_hidden @ weight.detach().float().T).log_softmax(-1)
    log_q = (teacher_hidden.detach()[rows].float() @ teacher_weight.detach().float().T).log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    # bfloat16 rounds each logit by up to 2^-9 of its size.
    torch.testing.assert_close(values[rows], expected.detach(), atol=0.02, rtol=0.01)
    expected_grad = torch.autograd.grad(expected.sum(), exact_hidden)[0]
    similarity = torch.nn.functional.cosine_similarity(grad_hidden[rows].float().flatten(), expected_grad.flatten(), 0)
    assert similarity > 0.99
    assert grad_weight.isfinite().all()
