"""Packed attention equals plain attention, written out in float64, one sequence at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.models import attention_kernels
from rlctl.models.packed_attention import packed_attention

SCALE = 0.3
# Keywords of packed_attention; sinks are drawn where True.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 3, "softcap": 2.0, "sinks": True},
}


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the softmax of masked scores, written out, each sequence by itself, times the values."""
    outputs = []
    heads_per_key = q.shape[1] // k.shape[1]
    for queries, shared_keys, shared_values in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
        keys = shared_keys.repeat_interleave(heads_per_key, 1)
        values = shared_values.repeat_interleave(heads_per_key, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * SCALE
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        positions = torch.arange(len(queries), device=q.device)
        distances = positions[:, None] - positions
        is_masked = (distances < 0) | (distances >= (window or len(queries)))
        weights = scores.masked_fill(is_masked, -torch.inf).exp()
        totals = weights.sum(-1, keepdim=True)
        if sinks is not None:
            totals = totals + sinks.exp()[:, None, None]
        outputs.append(torch.einsum("hqk,khd->qhd", weights / totals, values))
    return torch.cat(outputs)


def draw_inputs(
    lengths: list[int], kv_heads: int, kind: str, dim: int = 8, v_dim: int = 8
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return queries, keys, values and the sinks, if any, as float64, and the kind's other keywords."""
    torch.manual_seed(sum(lengths))
    keywords = dict(KINDS[kind])
    shapes = [(4, dim), (kv_heads, dim), (kv_heads, v_dim)]
    tensors = [torch.randn(sum(lengths), *shape, dtype=torch.float64) for shape in shapes]
    if keywords.pop("sinks", False):
        tensors.append(torch.randn(4, dtype=torch.float64))
    return tensors, keywords


def ends_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def attend(inputs: list[Tensor], lengths: list[int], keywords: dict[str, Any]) -> Tensor:
    q, k, v, *sinks = inputs
    cu_seqlens = ends_of(lengths).to(q.device)
    sink = sinks[0] if sinks else None
    return packed_attention(q, k, v, cu_seqlens, max(lengths), SCALE, sinks=sink, **keywords)


def compare_with_plain(lengths: list[int], kv_heads: int, kind: str, v_dim: int = 8) -> None:
    tensors, keywords = draw_inputs(lengths, kv_heads, kind, v_dim=v_dim)
    plain_inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    q, k, v, *sinks = plain_inputs
    expected = plain_attention(q, k, v, lengths, **keywords, sinks=sinks[0] if sinks else None)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    packed_inputs = [tensor.float().requires_grad_() for tensor in tensors]
    output = attend(packed_inputs, lengths, keywords)
    (output * weight.float()).sum().backward()
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=0)
    for packed_input, plain_input in zip(packed_inputs, plain_inputs):
        torch.testing.assert_close(packed_input.grad.double(), plain_input.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize("lengths", [[7], [1], [1, 1, 1], [5, 5, 5], [3, 17, 1, 8, 2, 16, 9], [40, 1]])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_equal_plain_attention(lengths: list[int], kv_heads: int, kind: str) -> None:
    compare_with_plain(lengths, kv_heads, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("v_dim", [4, 12])
def test_values_have_a_size_of_their_own(kind: str, v_dim: int) -> None:
    compare_with_plain([3, 17, 1, 8], 2, kind, v_dim)


@pytest.mark.parametrize("kind", ["softcap", "all"])
def test_scores_that_exceed_a_block_are_computed_by_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "_BLOCK_SCORES", 300)
    compare_with_plain([3, 17, 1, 8, 2, 16, 9], 2, kind)


# Outputs alone: flex attention has no backward pass on a CPU.
@pytest.mark.parametrize("window", [None, 128])
def test_flex_attention_sees_what_plain_attention_sees(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(attention_kernels, "_compiled_flex", lambda: flex_attention.flex_attention)
    lengths = [130, 3, 256, 1, 500, 60]
    tensors, _ = draw_inputs(lengths, 2, "all", dim=16, v_dim=32)
    q, k, v, sinks = map(Tensor.float, tensors)
    options: dict[str, Any] = {"window": window, "softcap": 2.0, "sinks": sinks}
    output = attention_kernels.flex(q, k, v, ends_of(lengths), SCALE, **options)
    torch.testing.assert_close(output, plain_attention(q, k, v, lengths, **options), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("lengths", [[130, 3, 256, 1, 500, 60], [1024], [2000], [128, 384]])
def test_flex_attention_skips_blocks_that_nobody_sees(lengths: list[int], window: int | None) -> None:
    mask = attention_kernels._block_mask(ends_of(lengths), 1024 if sum(lengths) <= 1024 else 2048, window)
    size = mask.seq_lengths[0]
    positions = torch.arange(size)
    is_seen = mask.mask_mod(None, None, positions[:, None], positions).view(size // 128, 128, -1, 128)
    is_seen_in_part = is_seen.any(3).any(1)
    is_seen_whole = is_seen.all(3).all(1)
    for expected_blocks, counts, indices in (
        (is_seen_in_part & ~is_seen_whole, mask.kv_num_blocks, mask.kv_indices),
        (is_seen_whole, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        listed = [set(row[:count].tolist()) for row, count in zip(indices[0, 0], counts[0, 0])]
        assert listed == [set(row.nonzero()[:, 0].tolist()) for row in expected_blocks]


def test_a_sequence_does_not_see_its_neighbours() -> None:
    inputs = [torch.randn(19, 2, 8) for _ in range(3)]
    lengths = [4, 9, 6]
    expected = attend(inputs, lengths, {})[4:13]
    for tensor in inputs:
        tensor[:4] = 100.0
        tensor[13:] = -100.0
    assert torch.equal(attend(inputs, lengths, {})[4:13], expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kv_heads", "v_dim"), [(4, 64), (2, 40)])
def test_the_gpu_kernels_agree_with_the_exact_form(kv_heads: int, kind: str, v_dim: int) -> None:
    lengths = [3, 130, 1, 64]
    tensors, keywords = draw_inputs(lengths, kv_heads, kind, dim=64, v_dim=v_dim)
    kernel_inputs = [tensor.cuda().bfloat16().requires_grad_() for tensor in tensors]
    exact_inputs = [tensor.detach().float().requires_grad_() for tensor in kernel_inputs]
    kernel_output = attend(kernel_inputs, lengths, keywords)
    exact_output = attend(exact_inputs, lengths, keywords)
    weight = torch.randn_like(exact_output)
    for output in (kernel_output, exact_output):
        (output.float() * weight).sum().backward()
    torch.testing.assert_close(kernel_output.float(), exact_output, atol=0.05, rtol=0.05)
    for kernel_input, exact_input in zip(kernel_inputs, exact_inputs):
        torch.testing.assert_close(kernel_input.grad.float(), exact_input.grad, atol=0.1, rtol=0.1)
