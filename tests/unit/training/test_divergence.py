"""Chunked divergences and their gradients equal the dense ones in float64, and hold one chunk of logits."""

import shutil
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.models.layer_kinds import LogitTransform
from rlctl.training.divergence import Divergence, chunked_divergence
from tests.compiled import new_graphs
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

each_divergence = pytest.mark.parametrize("divergence", DIVERGENCES, ids=NAMES)


def measure(student: Model, teacher: Model, divergence: Divergence, **changes: Any) -> Tensor:
    settings: dict[str, Any] = {"vocab": VOCAB, "temperature": 0.7, "chunk": 5, "compiled": False} | changes
    return chunked_divergence(student.hidden, student.head, teacher.hidden, teacher.head, divergence, **settings)


# Student and teacher, each as arguments of `make_model`.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "equal_widths": ({}, {}),
    "wider_teacher": ({"width": 8}, {"width": 48}),
    "padded_student": ({"columns": 40, "bias": True}, {}),
    "padded_teacher": ({}, {"columns": 64, "bias": True}),
    "softcap_and_scale": (
        {"transform": LogitTransform(2.0, 3.0), "bias": True},
        {"transform": LogitTransform(0.5, None), "bias": True},
    ),
    "softcapped_teacher": ({}, {"transform": LogitTransform(3.0, 2.0)}),
}


@each_divergence
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_the_dense_ones(divergence: Divergence, pair: str, temperature: float) -> None:
    student = make_model(1, **PAIRS[pair][0])
    teacher = make_model(2, **PAIRS[pair][1])
    exact = student.to(torch.float64)
    exact_teacher = teacher.to(torch.float64)
    log_p = exact.log_softmax(VOCAB, temperature)
    expected = dense_divergence(log_p, exact_teacher.log_softmax(VOCAB, temperature), divergence)
    expected_gradients = torch.autograd.grad(weigh(expected), exact.leaves())
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        measured_student = student.to(dtype)
        values = measure(measured_student, teacher.to(dtype), divergence, temperature=temperature)
        assert_exact(values, measured_student, expected, expected_gradients, tolerance)


@each_divergence
def test_the_chunk_size_changes_neither_values_nor_gradients(divergence: Divergence) -> None:
    teacher = make_model(2)
    passes = []
    for chunk in (100, 23, 7, 1):
        student = make_model(1)
        values = measure(student, teacher, divergence, chunk=chunk)
        passes.append([values, *torch.autograd.grad(weigh(values), student.leaves())])
    for chunked in passes[1:]:
        for tensor, whole in zip(chunked, passes[0]):
            torch.testing.assert_close(tensor, whole, atol=1e-6, rtol=1e-6)


@each_divergence
def test_equal_distributions_are_at_0_where_the_gradient_is_0(divergence: Divergence) -> None:
    student = make_model(1)
    values = measure(student, make_model(1), divergence)
    torch.testing.assert_close(values, torch.zeros(23), atol=1e-6, rtol=0)
    for gradient in torch.autograd.grad(values.sum(), student.leaves()):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)


@each_divergence
def test_certain_and_impossible_tokens_have_finite_values_and_gradients(divergence: Divergence) -> None:
    student = make_model(1, width=1, transform=LogitTransform(1000.0, None))
    teacher = make_model(2, width=1, transform=LogitTransform(1000.0, None))
    values = measure(student, teacher, divergence)
    assert values.isfinite().all() and values.min() >= -1e-6
    if divergence.kind == "jensen_shannon":
        assert values.max() <= 0.6932
    for gradient in torch.autograd.grad(values.sum(), student.leaves()):
        assert gradient.isfinite().all()


def test_kl_divergences_are_the_ends_of_jensen_shannons() -> None:
    """Divided by its distance from an end, the divergence approaches the KL there."""
    student = make_model(1).to(torch.float64)
    teacher = make_model(2).to(torch.float64)
    for beta, kind in ((1e-6, "forward_kl"), (1 - 1e-6, "reverse_kl")):
        near_end = measure(student, teacher, Divergence("jensen_shannon", beta)) / 1e-6
        end: Any = kind
        torch.testing.assert_close(near_end, measure(student, teacher, Divergence(end, 0.5)), rtol=1e-3, atol=0)


def test_the_teacher_gets_no_gradient_and_a_frozen_head_of_the_student_none() -> None:
    student = freeze_head(make_model(1))
    teacher = make_model(2, bias=True)
    measure(student, teacher, DIVERGENCES[0]).sum().backward()
    assert student.hidden.grad is not None and student.head.weight.grad is None
    assert all(leaf.grad is None for leaf in teacher.leaves())


def test_a_tied_head_sums_its_two_gradients() -> None:
    """Hidden states are functions of the head's rows, as under tied embeddings."""
    tokens = torch.arange(23) % VOCAB
    student = make_model(1)
    teacher = make_model(2)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        tied = student.to(dtype)
        weight = tied.head.weight
        hidden = weight[tokens].tanh()
        if dtype == torch.float32:
            values = measure(Model(hidden, tied.head), teacher, DIVERGENCES[0])
        else:
            log_q = teacher.to(dtype).log_softmax(VOCAB, 0.7)
            values = dense_divergence(Model(hidden, tied.head).log_softmax(VOCAB, 0.7), log_q, DIVERGENCES[0])
        gradients.append(torch.autograd.grad(weigh(values), weight)[0].double())
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=0)


def test_no_rows_give_zero_gradients_not_missing_ones() -> None:
    student = make_model(1, rows=0)
    measure(student, make_model(2, rows=0), DIVERGENCES[0]).sum().backward()
    assert student.hidden.grad is not None and student.head.weight.grad is not None
    assert not student.head.weight.grad.any()


def test_a_head_that_is_too_small_and_rows_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="the teacher's head has 20 tokens; the vocabulary has 32"):
        measure(make_model(1), make_model(2, columns=20), DIVERGENCES[0])
    with pytest.raises(ValueError, match="the student's head has 20 tokens; the vocabulary has 32"):
        measure(make_model(1, columns=20), make_model(2), DIVERGENCES[0])
    with pytest.raises(ValueError, match="the student has 23 rows, the teacher 22"):
        measure(make_model(1), make_model(2, rows=22), DIVERGENCES[0])


@each_divergence
def test_memory_grows_with_the_vocabulary_by_the_gradients_and_a_chunk_of_logits_alone(divergence: Divergence) -> None:
    """Bytes that torch's allocator gives out during a forward and a backward pass, at their peak."""
    chunk = 16
    width = 8

    def measure_peak(rows: int, vocab: int) -> int:
        student = make_model(1, rows=rows, width=width, columns=vocab)
        teacher = make_model(2, rows=rows, width=width, columns=vocab)
        return peak_bytes(lambda: measure(student, teacher, divergence, vocab=vocab, chunk=chunk).sum().backward())

    small = measure_peak(64, 1000)
    large = measure_peak(64, 4000)
    # In float32: the gradient of the head, the product that is added to it, and chunks of logits.
    bytes_per_token = (large - small) / 3000
    chunks = (bytes_per_token - 2 * width * 4) / (chunk * 4)
    assert 1 < chunks <= 7
    # Further rows cost their hidden states, and none of their 4,000 logits.
    row_bytes = (measure_peak(256, 4000) - large) / (256 - 64)
    assert row_bytes < 4 * (3 * width + 8)


@pytest.mark.long  # It compiles.
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_code_has_the_same_results_and_serves_packs_of_every_size() -> None:
    divergence = Divergence("jensen_shannon", 0.3)
    transform = LogitTransform(2.0, 5.0)

    def run_pack(rows: int, compiled: bool) -> list[Tensor]:
        student = make_model(1, rows=rows, transform=transform)
        teacher = make_model(2, rows=rows, width=24, columns=40)
        values = measure(student, teacher, divergence, chunk=8, compiled=compiled)
        return [values, *torch.autograd.grad(weigh(values), student.leaves())]

    torch.compiler.reset()
    assert new_graphs(partial(run_pack, 21, True)) > 0
    for rows in (40, 7, 8, 16, 3):
        assert new_graphs(partial(run_pack, rows, True)) == 0
    for fused, eager in zip(run_pack(21, True), run_pack(21, False)):
        torch.testing.assert_close(fused, eager, atol=2e-6, rtol=1e-5)
