from dataclasses import replace

import pytest

from rlctl.config.trainer_schema import OptimizerSection
from rlctl.training.update import learning_rate

BASE = OptimizerSection(
    name="adamw", lr=1.0, betas=[0.9, 0.99], eps=1e-8, weight_decay=0.0, max_grad_norm=1.0,
    schedule="constant", warmup_steps=0, min_lr_ratio=0.0,
)  # fmt: skip


def learning_rates(section: OptimizerSection, total: int) -> list[float]:
    return [learning_rate(update, section, total) for update in range(total)]


def test_warm_up_rises_in_equal_parts_and_ends_at_the_peak() -> None:
    assert learning_rates(replace(BASE, warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_starts_at_the_peak_and_no_update_is_wasted_on_zero() -> None:
    assert learning_rates(replace(BASE, schedule="linear"), 4) == [1.0, 0.75, 0.5, 0.25]


def test_cosine_is_halfway_in_the_middle() -> None:
    values = learning_rates(replace(BASE, schedule="cosine", warmup_steps=2), 10)
    assert values[2] == 1.0 and values[6] == pytest.approx(0.5)
    assert values[2:] == sorted(values[2:], reverse=True)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_floor_is_kept_past_the_planned_end(schedule: str) -> None:
    section = replace(BASE, schedule=schedule, min_lr_ratio=0.1)
    assert learning_rate(10, section, 10) == pytest.approx(0.1)
    assert learning_rate(1000, section, 10) == pytest.approx(0.1)


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    assert learning_rates(replace(BASE, schedule="cosine", warmup_steps=10), 3) == [0.1, 0.2, 0.3]
