"""Divergences from a teacher's top tokens equal the dense ones over the same outcomes, in float64, with gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.models.layer_kinds import LogitTransform
from rlctl.training.divergence import Divergence, chunked_divergence
from rlctl.training.top_divergence import chunked_top, top_divergence
from tests.unit.training.allocations import peak_bytes
from tests.unit.training.divergences import (
    DIVERGENCES,
    NAMES,
    VOCAB,
    Model,
    assert_exact,
    dense_divergence,
    freeze_head,
    make_model,
    weigh,
)

TOP = 5
each_divergence = pytest.mark.parametrize("divergence", DIVERGENCES, ids=NAMES)
each_rest = pytest.mark.parametrize("rest", ["bin", "renormalized"])


def find_top(teacher: Model, count: int = TOP, **changes: Any) -> tuple[Tensor, Tensor]:
    settings: dict[str, Any] = {"vocab": VOCAB, "temperature": 0.7, "chunk": 5} | changes
    return chunked_top(teacher.hidden, teacher.head, count, **settings)


def measure(student: Model, top: tuple[Tensor, Tensor], divergence: Divergence, rest: Any, **changes: Any) -> Tensor:
    settings: dict[str, Any] = {"vocab": VOCAB, "temperature": 0.7, "chunk": 5} | changes
    ids, log_probs = top
    return top_divergence(student.hidden, student.head, ids, log_probs, divergence, rest, **settings)


def select_outcomes(log_probs: Tensor, ids: Tensor, rest: str) -> Tensor:
    """Return the log-probs of the outcomes that a divergence is over, from those of all tokens."""
    known = log_probs.gather(1, ids)
    if rest == "renormalized":
        return known.log_softmax(-1)
    return torch.cat((known, log_probs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)), -1)


def test_the_top_of_a_teacher_is_that_of_its_dense_log_probs_without_padding() -> None:
    teacher = make_model(2, columns=64, bias=True, transform=LogitTransform(2.0, 3.0))
    expected = teacher.log_softmax(VOCAB, 0.7).topk(TOP)
    for chunk in (5, 100):
        ids, log_probs = find_top(teacher, chunk=chunk)
        assert torch.equal(ids, expected.indices) and not log_probs.requires_grad
        torch.testing.assert_close(log_probs, expected.values.detach(), atol=1e-6, rtol=0)


@each_divergence
@each_rest
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(2.0, 3.0)], ids=["plain", "softcap"])
def test_values_and_gradients_equal_the_dense_ones(
    divergence: Divergence, rest: str, transform: LogitTransform
) -> None:
    student = make_model(1, columns=40, bias=True, transform=transform)
    teacher = make_model(2, width=48)
    exact = student.to(torch.float64)
    exact_teacher = teacher.to(torch.float64)
    ids, _ = find_top(teacher)
    log_p = select_outcomes(exact.log_softmax(VOCAB, 0.7), ids, rest)
    log_q = select_outcomes(exact_teacher.log_softmax(VOCAB, 0.7), ids, rest)
    expected = dense_divergence(log_p, log_q, divergence)
    expected_gradients = torch.autograd.grad(weigh(expected), exact.leaves())
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-13)):
        measured_student = student.to(dtype)
        values = measure(measured_student, find_top(teacher.to(dtype)), divergence, rest)
        assert_exact(values, measured_student, expected, expected_gradients, tolerance)


@each_divergence
def test_a_bin_bounds_the_whole_vocabularys_divergence_from_below_and_reaches_it(divergence: Divergence) -> None:
    student = make_model(1).to(torch.float64)
    teacher = make_model(2).to(torch.float64)
    whole = chunked_divergence(
        student.hidden,
        student.head,
        teacher.hidden,
        teacher.head,
        divergence,
        vocab=VOCAB,
        temperature=0.7,
        chunk=5,
        compiled=False,
    )
    previous = torch.zeros_like(whole)
    for count in (1, 8, 24, VOCAB - 1):
        values = measure(student, find_top(teacher, count), divergence, "bin")
        assert (values <= whole + 1e-12).all() and (values >= previous - 1e-12).all()
        previous = values
    torch.testing.assert_close(previous, whole, atol=1e-9, rtol=0)


@each_divergence
def test_a_bin_pulls_the_students_mass_to_the_known_tokens_and_renormalized_does_not(divergence: Divergence) -> None:
    """Give the student the teacher's ratios among the known tokens, and too little mass on them together."""
    teacher = make_model(2).to(torch.float64)
    ids, log_q = find_top(teacher)
    log_p = teacher.log_softmax(VOCAB, 0.7).detach()
    logits = log_p.scatter(1, ids, log_p.gather(1, ids) - 1)
    student = Model(logits, make_model(1, width=VOCAB).head).to(torch.float64)
    with torch.no_grad():
        # Hidden states are the logits.
        student.head.weight.copy_(torch.eye(VOCAB))
    gradients = {}
    for rest in ("bin", "renormalized"):
        values = measure(student, (ids, log_q), divergence, rest, temperature=1.0)
        gradient = torch.autograd.grad(values.sum(), student.hidden)[0]
        gradients[rest] = gradient.gather(1, ids).sum(-1)
    assert (gradients["bin"] < -1e-4).all()
    assert gradients["renormalized"].abs().max() < 1e-12


@each_divergence
@each_rest
def test_certain_and_impossible_tokens_have_finite_values_and_gradients(divergence: Divergence, rest: str) -> None:
    steep = LogitTransform(1000.0, None)
    student = make_model(1, width=1, transform=steep)
    values = measure(student, find_top(make_model(2, width=1, transform=steep)), divergence, rest)
    assert values.isfinite().all() and values.min() >= -1e-6
    for gradient in torch.autograd.grad(values.sum(), student.leaves()):
        assert gradient.isfinite().all()


def test_a_frozen_head_has_no_gradient_and_no_rows_have_zero_gradients() -> None:
    student = freeze_head(make_model(1))
    measure(student, find_top(make_model(2)), DIVERGENCES[0], "bin").sum().backward()
    assert student.hidden.grad is not None and student.head.weight.grad is None
    empty = make_model(1, rows=0)
    measure(empty, find_top(make_model(2, rows=0)), DIVERGENCES[0], "bin").sum().backward()
    assert empty.head.weight.grad is not None and not empty.head.weight.grad.any()


def test_a_top_without_a_rest_is_refused() -> None:
    top = find_top(make_model(2), VOCAB)
    with pytest.raises(ValueError, match="the teacher's top 32 of a vocabulary of 32 leave no rest"):
        measure(make_model(1), top, DIVERGENCES[0], "bin")


def test_memory_grows_with_the_vocabulary_by_the_gradients_and_a_chunk_of_logits_alone() -> None:
    """Bytes that torch's allocator gives out during a forward and a backward pass, at their peak."""
    chunk = 16
    width = 8

    def measure_peak(rows: int, vocab: int) -> int:
        student = make_model(1, rows=rows, width=width, columns=vocab)
        teacher = make_model(2, rows=rows, width=width, columns=vocab)

        def run_both_passes() -> None:
            top = find_top(teacher, vocab=vocab, chunk=chunk)
            measure(student, top, DIVERGENCES[0], "bin", vocab=vocab, chunk=chunk).sum().backward()

        return peak_bytes(run_both_passes)

    small = measure_peak(64, 1000)
    large = measure_peak(64, 4000)
    # In float32: the gradient of the head, the product that is added to it, and chunks of logits.
    bytes_per_token = (large - small) / 3000
    chunks = (bytes_per_token - 2 * width * 4) / (chunk * 4)
    assert 1 < chunks <= 7
    # Further rows cost their hidden states and known tokens, and none of their 4,000 logits.
    row_bytes = (measure_peak(256, 4000) - large) / (256 - 64)
    assert row_bytes < 4 * (3 * width + 12 * TOP)
