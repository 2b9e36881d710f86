import math
from dataclasses import replace

import pytest

from rlctl.grpo.logprob_mismatch import Mismatch
from rlctl.grpo.parity_check import OwnRounding, Rounding, Verdict, bound_of, bound_of_steps, judge
from rlctl.preflight.load import load
from rlctl.workers.errors import Failure, WorkerError


@pytest.mark.parametrize(
    ("trainer", "engine", "explains"),
    [
        (1.0555, 1.0576, True),
        (1.0519, 1.0486, True),
        (1.03, 1.07, False),
        # Only the trainer is far from the float32 pass, so the trainer computes something else.
        (1.3, 1.04, False),
        (math.inf, math.inf, False),
        (math.nan, 1.05, False),
        (1.05, math.nan, False),
    ],
)
def test_rounding_explains_a_gap_whose_sides_are_about_as_far_from_float32(
    trainer: float, engine: float, explains: bool
) -> None:
    gap = Mismatch(token_mult_prob_error=1.06, kl=0.0, max_abs_diff=0.2, tokens=128)
    verdict = judge(gap, "bfloat16", lambda: Rounding(trainer, engine))
    assert verdict == Verdict(explains, verdict.explanation)
    assert f"{trainer:.4f} from the trainer, {engine:.4f} from the engine" in verdict.explanation


def test_a_gap_in_float32_and_one_without_a_second_pass_are_not_explained() -> None:
    gap = Mismatch(token_mult_prob_error=1.06, kl=0.0, max_abs_diff=0.2, tokens=128)
    assert judge(gap, "float32", lambda: pytest.fail("measured")) == Verdict(False)
    assert judge(gap, "bfloat16", lambda: None) == Verdict(False)


@pytest.mark.parametrize(
    ("engine", "trainer", "agrees"),
    [
        # The gap is within the bound, so the second measurement, here NaN, is not used.
        (1.000009, math.nan, True),
        # In a deep model the trainer too differs more from itself.
        (1.00006, 1.000004, True),
        (1.00006, 1.000001, False),
        (1.00006, 1.0, False),
        (1.002, 1.001, False),
        (math.nan, 1.001, False),
    ],
)
def test_float32_has_a_bound_near_what_is_measured(engine: float, trainer: float, agrees: bool) -> None:
    gap = Mismatch(token_mult_prob_error=engine, kl=0.0, max_abs_diff=0.2, tokens=128)
    assert judge(gap, "float32", lambda: OwnRounding(trainer, engine), 1.00001).agree is agrees


def test_the_bound_in_float32_is_that_of_the_engine_on_its_device_and_of_the_model() -> None:
    run = load("grpo", None, []).settled
    assert run.facts is not None
    assert bound_of(run, "cpu", "float32") == 1.00001
    assert bound_of(run, "cuda", "float32") == bound_of(replace(run, facts=None), "cpu", "float32") == 1.001
    assert bound_of(replace(run, facts=replace(run.facts, model_type="bloom")), "cpu", "float32") == 1.001
    assert bound_of(run, "cpu", "bfloat16") == 1.05


def test_a_second_pass_that_fails_leaves_the_gap_as_the_reason() -> None:
    gap = Mismatch(token_mult_prob_error=1.06, kl=0.0, max_abs_diff=0.2, tokens=128)

    def fail() -> Rounding:
        raise WorkerError("exact_log_probs", [Failure("trainer-0", "OutOfMemoryError", "CUDA out of memory", "")])

    reason = "the trainer's pass in float32 failed: exact_log_probs on trainer-0: OutOfMemoryError: CUDA out of memory"
    assert judge(gap, "bfloat16", fail) == Verdict(False, reason)


@pytest.mark.parametrize(
    ("configured", "probed", "dtype", "bound"),
    [
        (1.05, 1.049, "bfloat16", 1.05),
        (1.05, 1.06, "bfloat16", 1.12),
        (1.5, 1.06, "bfloat16", 1.5),
        # The user configured a stricter bound than the dtype's, so the bound stays.
        (1.02, 1.06, "bfloat16", 1.02),
        (1.05, 1.0005, "float32", 1.05),
    ],
)
def test_steps_of_a_model_that_rounds_more_have_a_wider_bound(
    configured: float, probed: float, dtype: str, bound: float
) -> None:
    assert bound_of_steps(configured, probed, dtype) == pytest.approx(bound)
