"""Packed attention equals plain attention, written out in float64, one sequence at a time."""

import pytest
import torch
from torch import Tensor

from rlctl.models.packed_attention import packed_attention

SCALE = 0.3


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Softmax of masked scores, written out, each sequence by itself."""
    out = []
    repeat = q.shape[1] // k.shape[1]
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
        ks, vs = ks.repeat_interleave(repeat, 1), vs.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * SCALE
        hidden = torch.ones(len(qs), len(qs), dtype=torch.bool).triu(1)
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), vs))
    return torch.cat(out)


@pytest.mark.parametrize("lengths", [[7], [1], [1, 1, 1], [5, 5, 5], [3, 17, 1, 8, 2, 16, 9], [40, 1]])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_output_and_gradients_equal_plain_attention(lengths: list[int], kv_heads: int) -> None:
    torch.manual_seed(sum(lengths))
    q, k, v = (torch.randn(sum(lengths), heads, 8, dtype=torch.float64) for heads in (4, kv_heads, kv_heads))
    weight = torch.randn_like(q)
    expected_inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = plain(*expected_inputs, lengths)
    (expected * weight).sum().backward()
    inputs = [x.float().requires_grad_() for x in (q, k, v)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    out = packed_attention(*inputs, cu_seqlens, max(lengths), SCALE)
    (out * weight.float()).sum().backward()
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)
    for got, want in zip(inputs, expected_inputs):
        torch.testing.assert_close(got.grad.double(), want.grad, atol=1e-5, rtol=0)


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
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_gpu_kernel_agrees_with_the_exact_form(kv_heads: int) -> None:
    lengths = [3, 130, 1, 64]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    q, k, v = (torch.randn(sum(lengths), heads, 64, device="cuda") for heads in (4, kv_heads, kv_heads))
    halves = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    wholes = [x.detach().float().requires_grad_() for x in halves]
    weight = torch.randn_like(q)
    for inputs in (halves, wholes):
        out = packed_attention(*inputs, cu_seqlens, max(lengths), SCALE)
        (out.float() * weight).sum().backward()
    for half, whole in zip(halves, wholes):
        torch.testing.assert_close(half.grad.float(), whole.grad, atol=0.1, rtol=0.1)
