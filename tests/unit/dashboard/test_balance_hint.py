"""Advice to divide devices differently is given only if it would make steps shorter, and names its figures."""

from pathlib import Path

import pytest

from rlctl.dashboard.balance_hint import better_division, hint
from rlctl.dashboard.state import read_state
from tests.unit.dashboard.synthetic import async_metrics, write_run


@pytest.mark.parametrize(
    ("division", "trainer_work", "generator_work", "best_division", "saved_share"),
    [
        # Training takes the work of 2 devices, generation that of 1. With 3 and 1 devices no step would be shorter.
        ((2, 2), 1.0, 0.5, (3, 1), 0.0),
        ((2, 6), 1.0, 1 / 3, (4, 4), 0.5),
        ((6, 2), 1 / 3, 1.0, (4, 4), 0.5),
        ((1, 1), 1.0, 0.2, (1, 1), 0.0),
        ((4, 4), 0.0, 0.0, (4, 4), 0.0),
    ],
)
def test_the_best_division_halves_what_can_be_halved(
    division: tuple[int, int],
    trainer_work: float,
    generator_work: float,
    best_division: tuple[int, int],
    saved_share: float,
) -> None:
    advised_division, share = better_division(division, trainer_work, generator_work)
    assert share == pytest.approx(saved_share)
    if saved_share:
        assert advised_division == best_division


def read_advice(tmp_path: Path, devices: tuple[int, int], steps: int = 20, **changes: float) -> str:
    """Return the advice on a run with some metrics changed. changes: by name, with two underscores for a slash."""
    metrics = {name.replace("__", "/"): metric for name, metric in changes.items()}
    run = write_run(tmp_path, steps=steps, metrics=lambda step: async_metrics(step) | metrics, devices=devices)
    return hint(read_state(run.path))


def test_an_idle_generator_gives_devices_away(tmp_path: Path) -> None:
    advice = read_advice(tmp_path, (2, 6), idle__trainer=0.0, idle__generator=0.66, time__idle_oldest=0.0)
    assert advice == "generator idle 66%: 4 to train and 4 to generate would save 49% of a step"


def test_waiting_for_the_oldest_is_the_bounds_doing(tmp_path: Path) -> None:
    advice = read_advice(tmp_path, (2, 6), idle__trainer=0.4, idle__generator=0.1, time__idle_oldest=1.0)
    assert advice.startswith("trainer waits 40% for stragglers: raise async.max_trajectory_age_steps")


def test_waiting_for_a_teacher_asks_for_more_of_its_engines(tmp_path: Path) -> None:
    advice = read_advice(tmp_path, (2, 6), idle__trainer=0.6, time__idle_oldest=0.2, time__idle_teacher=0.8)
    assert advice == "trainer waits 32% for the teacher: raise teacher.num_engines"


def test_there_is_none_where_nothing_would_help_or_little_is_known(tmp_path: Path) -> None:
    busy = {"idle__trainer": 0.0, "idle__generator": 0.05, "time__idle_oldest": 0.0}
    assert read_advice(tmp_path / "a", (4, 4), **busy) == ""
    assert read_advice(tmp_path / "b", (2, 6), steps=3, idle__generator=0.9) == ""
