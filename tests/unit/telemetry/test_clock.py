"""The spans of a step add up to its wall time."""

import math

import pytest

from rlctl.telemetry.clock import StepClock, productive_seconds


class HandClock:
    """Clock whose time a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand_clock() -> HandClock:
    return HandClock()


def test_phases_idle_and_other_sum_to_the_step(hand_clock: HandClock) -> None:
    clock = StepClock(hand_clock)
    for name, seconds in (("generation", 3.0), ("train", 2.0), ("generation", 0.5)):
        hand_clock.now += 0.25
        with clock.phase(name):
            hand_clock.now += seconds
    with clock.phase("idle_trainer"):
        hand_clock.now += 1.0
    times = clock.finish()
    assert times == {
        "time/generation": 3.5,
        "time/train": 2.0,
        "time/idle_trainer": 1.0,
        "time/other": 0.75,
        "time/step": 7.25,
    }


def test_the_sum_holds_on_the_real_clock() -> None:
    clock = StepClock()
    for name in ("a", "b", "c"):
        with clock.phase(name):
            sum(range(1000))
    times = clock.finish()
    wall = times.pop("time/step")
    assert math.fsum(times.values()) == pytest.approx(wall, rel=1e-12)


def test_nesting_is_an_error_that_names_both(hand_clock: HandClock) -> None:
    clock = StepClock(hand_clock)
    with pytest.raises(RuntimeError, match="phase b begins inside a"), clock.phase("a"), clock.phase("b"):
        pass


def test_a_phase_that_fails_is_counted_and_closed(hand_clock: HandClock) -> None:
    clock = StepClock(hand_clock)
    with pytest.raises(ValueError), clock.phase("a"):
        hand_clock.now += 1.0
        raise ValueError
    with clock.phase("b"):
        hand_clock.now += 2.0
    assert clock.finish() == {"time/a": 1.0, "time/b": 2.0, "time/other": 0.0, "time/step": 3.0}


def test_validation_and_checkpoint_are_no_productive_time() -> None:
    times = {"time/train": 2.0, "time/validation": 5.0, "time/checkpoint": 1.0, "time/other": 1.0, "time/step": 9.0}
    assert productive_seconds(times) == 3.0
