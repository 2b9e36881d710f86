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


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax of masked scores, written out, each sequence by itself."""
    out = []
    repeat = q.shape[1] // k.shape[1]
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
        ks, vs = ks.repeat_interleave(repeat, 1), vs.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * SCALE
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(len(qs), device=q.device)
        back = at[:, None] - at
        hidden = (back < 0) | (back >= (window or len(qs)))
        exp = scores.masked_fill(hidden, -torch.inf).exp()
        total = exp.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
        out.append(torch.einsum("hqk,khd->qhd", exp / total, vs))
    return torch.cat(out)


def drawn(
    lengths: list[int], kv_heads: int, kind: str, dim: int = 8, v_dim: int = 8
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return q, k, v and the sinks, if any, as float64, and the kind's other keywords."""
    torch.manual_seed(sum(lengths))
    keywords = dict(KINDS[kind])
    shapes = [(4, dim), (kv_heads, dim), (kv_heads, v_dim)]
    tensors = [torch.randn(sum(lengths), *shape, dtype=torch.float64) for shape in shapes]
    return tensors + ([torch.randn(4, dtype=torch.float64)] if keywords.pop("sinks", False) else []), keywords


def ends_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def attend(inputs: list[Tensor], lengths: list[int], keywords: dict[str, Any]) -> Tensor:
    q, k, v, *sinks = inputs
    cu_seqlens = ends_of(lengths).to(q.device)
    sink = sinks[0] if sinks else None
    return packed_attention(q, k, v, cu_seqlens, max(lengths), SCALE, sinks=sink, **keywords)


def compare(lengths: list[int], kv_heads: int, kind: str, v_dim: int = 8) -> None:
    tensors, keywords = drawn(lengths, kv_heads, kind, v_dim=v_dim)
    expected_inputs = [x.clone().requires_grad_() for x in tensors]
    q, k, v, *sinks = expected_inputs
    expected = plain(q, k, v, lengths, **keywords, sinks=sinks[0] if sinks else None)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    inputs = [x.float().requires_grad_() for x in tensors]
    out = attend(inputs, lengths, keywords)
    (out * weight.float()).sum().backward()
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)
    for got, want in zip(inputs, expected_inputs):
        torch.testing.assert_close(got.grad.double(), want.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize("lengths", [[7], [1], [1, 1, 1], [5, 5, 5], [3, 17, 1, 8, 2, 16, 9], [40, 1]])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_equal_plain_attention(lengths: list[int], kv_heads: int, kind: str) -> None:
    compare(lengths, kv_heads, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("v_dim", [4, 12])
def test_values_have_a_size_of_their_own(kind: str, v_dim: int) -> None:
    compare([3, 17, 1, 8], 2, kind, v_dim)


@pytest.mark.parametrize("kind", ["softcap", "all"])
def test_scores_that_exceed_a_block_are_computed_by_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "_BLOCK_SCORES", 300)
    compare([3, 17, 1, 8, 2, 16, 9], 2, kind)


# Backward is a GPU's: flex attention has none on a CPU.
@pytest.mark.parametrize("window", [None, 128])
def test_flex_attention_sees_what_plain_attention_sees(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(attention_kernels, "_compiled_flex", lambda: flex_attention.flex_attention)
    lengths = [130, 3, 256, 1, 500, 60]
    q, k, v, sinks = (x.float() for x in drawn(lengths, 2, "all", dim=16, v_dim=32)[0])
    options: dict[str, Any] = {"window": window, "softcap": 2.0, "sinks": sinks}
    got = attention_kernels.flex(q, k, v, ends_of(lengths), SCALE, **options)
    torch.testing.assert_close(got, plain(q, k, v, lengths, **options), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("lengths", [[130, 3, 256, 1, 500, 60], [1024], [2000], [128, 384]])
def test_flex_attention_skips_blocks_that_nobody_sees(lengths: list[int], window: int | None) -> None:
    mask = attention_kernels._block_mask(ends_of(lengths), 1024 if sum(lengths) <= 1024 else 2048, window)
    size = mask.seq_lengths[0]
    at = torch.arange(size)
    seen = mask.mask_mod(None, None, at[:, None], at).view(size // 128, 128, -1, 128)
    some, whole = seen.any(3).any(1), seen.all(3).all(1)
    for chosen, numbers, order in (
        (some & ~whole, mask.kv_num_blocks, mask.kv_indices),
        (whole, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        listed = [set(row[:count].tolist()) for row, count in zip(order[0, 0], numbers[0, 0])]
        assert listed == [set(row.nonzero()[:, 0].tolist()) for row in chosen]


def test_a_sequence_does_not_see_its_neighbours() -> None:
    lengths, at = [4, 9, 6], slice(4, 13)
    q, k, v = (torch.randn(19, 2, 8) for _ in range(3))
    cu_seqlens = torch.tensor([0, 4, 13, 19], dtype=torch.int32)
    before = packed_attention(q, k, v, cu_seqlens, max(lengths), SCALE)
    for x in (q, k, v):
        x[:4], x[13:] = 100.0, -100.0
    assert torch.equal(packed_attention(q, k, v, cu_seqlens, max(lengths), SCALE)[at], before[at])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kv_heads", "v_dim"), [(4, 64), (2, 40)])
def test_the_gpu_kernels_agree_with_the_exact_form(kv_heads: int, kind: str, v_dim: int) -> None:
    lengths = [3, 130, 1, 64]
    tensors, keywords = drawn(lengths, kv_heads, kind, dim=64, v_dim=v_dim)
    halves = [x.cuda().bfloat16().requires_grad_() for x in tensors]
    wholes = [x.detach().float().requires_grad_() for x in halves]
    outputs = [attend(inputs, lengths, keywords) for inputs in (halves, wholes)]
    weight = torch.randn_like(outputs[1])
    for out in outputs:
        (out.float() * weight).sum().backward()
    torch.testing.assert_close(outputs[0].float(), outputs[1], atol=0.05, rtol=0.05)
    for half, whole in zip(halves, wholes):
        torch.testing.assert_close(half.grad.float(), whole.grad, atol=0.1, rtol=0.1)
