"""Metrics of a step equal values that were computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from rlctl.config.grpo_schema import DynamicSamplingSection, GrpoSection, OverlongSection
from rlctl.data.tasks import Task
from rlctl.generation.engine import EngineStats
from rlctl.generation.requests import Completion, Finish
from rlctl.grpo.advantages.group_mean import GroupMean
from rlctl.grpo.advantages.sections import GroupMeanSection
from rlctl.grpo.batch import make_batch
from rlctl.grpo.losses.sections import GrpoLossSection
from rlctl.grpo.metrics import (
    TRAINER_PHASES,
    EngineInterval,
    engine_metrics,
    generator_metrics,
    prefix_metrics,
    refit_metrics,
    rollout_metrics,
    sampling_metrics,
    scoring_metrics,
    source_metrics,
    speed_metrics,
    turn_metrics,
    update_metrics,
    validation_metrics,
)
from rlctl.preflight.declared_columns import phase_of
from rlctl.refit.protocol import RefitReport
from rlctl.rewards.scorer import Score
from rlctl.rollout.types import Rollout, RolloutGroup, Waste
from tests.turns import turn

OFF = DynamicSamplingSection(None, 0.0)
FILTER = DynamicSamplingSection("rewards", 0.0)
OVERLONG = OverlongSection(None, 1.0, False)
LOSS = GrpoLossSection(
    "grpo", "rollout", None, None, None, None, 1.0, 0.0, "k3", None, 0.0, None, 0.2, 0.2, None, "token"
)
CONFIG = GrpoSection(1, 4, 4, 1, FILTER, OVERLONG, GroupMeanSection("group_mean", False), LOSS)
TIMES = {"time/step": 12.0, "time/generation": 4.0, "time/train": 3.0, "time/refit": 1.0, "time/checkpoint": 2.0}


def make_group(prompt: int, rollouts: list[tuple[int, float | None, Finish]]) -> RolloutGroup:
    """Return a group. prompt: number of prompt tokens. rollouts: (length, reward, finish) of each rollout."""
    task = Task("p", [1] * prompt, "?", "!")
    scored = []
    for index, (length, reward, finish) in enumerate(rollouts):
        zeros = np.zeros(length, np.int32)
        answer = Completion(zeros, np.zeros(length, np.float32), zeros, finish)
        rollout = Rollout.from_turn(turn(0, index, task.tokens), answer)
        scored.append(replace(rollout, score=Score(reward, {"exact": reward}, None, reward == 1.0)))
    return RolloutGroup(task, scored)


def measure_rollouts(groups: list[RolloutGroup]) -> dict[str, float]:
    return rollout_metrics(groups, make_batch(groups, CONFIG, GroupMean(normalize_std=False)))


def test_rewards_lengths_and_tokens_of_a_step() -> None:
    groups = [
        make_group(10, [(4, 1.0, "stop"), (8, 0.0, "length")]),
        make_group(20, [(2, 1.0, "stop"), (6, 1.0, "stop")]),
    ]
    assert measure_rollouts(groups) == pytest.approx(
        {
            "reward/mean": 0.75,
            "reward/std": np.sqrt(3) / 4,
            "reward/accuracy": 0.75,
            "reward/failed": 0,
            "reward/failed_share": 0,
            "reward/exact/mean": 0.75,
            "reward/exact/failed": 0,
            "advantage/mean": 0,
            "advantage/std": 0.5,
            "advantage/zero": 0,
            "rollouts/non_finite": 0,
            "length/mean": 5,
            "length/p90": 7.4,
            "length/max": 8,
            "length/truncated": 0.25,
            "groups/uniform": 0.5,
            "tokens/prompt": 2 * 10 + 2 * 20,
            "tokens/generated": 20,
            "tokens/trained": (10 + 4) + (10 + 8),
        }
    )


def test_a_failed_reward_is_counted_and_is_neither_a_wrong_answer_nor_a_zero() -> None:
    numbers = measure_rollouts(
        [make_group(1, [(1, 1.0, "stop"), (1, None, "stop"), (1, 0.0, "stop"), (1, 1.0, "stop")])]
    )
    assert (numbers["reward/failed"], numbers["reward/failed_share"]) == (1.0, 0.25)
    assert numbers["reward/mean"] == numbers["reward/accuracy"] == pytest.approx(2 / 3)


def test_each_reward_has_a_mean_and_failures_of_its_own() -> None:
    group = make_group(1, [(1, 1.0, "stop"), (1, None, "stop")])
    scores = [
        Score(1.5, {"exact": 1.0, "brevity": 0.5}, None, True),
        Score(None, {"exact": 0.0, "brevity": None}, "no", False),
    ]
    rollouts = [replace(rollout, score=score) for rollout, score in zip(group.rollouts, scores)]
    batch = make_batch([group], CONFIG, GroupMean(normalize_std=False))
    metrics = rollout_metrics([RolloutGroup(group.task, rollouts)], batch)
    metrics_of_rewards = {name: number for name, number in metrics.items() if name.count("/") == 2}
    assert metrics_of_rewards == {
        "reward/exact/mean": 0.5,
        "reward/exact/failed": 0,
        "reward/brevity/mean": 0.5,
        "reward/brevity/failed": 1,
    }


def validate(*rewards_of_groups: list[float | None]) -> dict[str, float]:
    """Return the metrics of a validation whose groups have these rewards."""
    groups = [make_group(1, [(3, reward, "stop") for reward in rewards]) for rewards in rewards_of_groups]
    return validation_metrics(groups)


def test_held_out_accuracy_is_of_what_was_scored_and_failures_are_apart() -> None:
    assert validate([1.0], [None], [0.0], [1.0]) == {
        "validation/answers": 4,
        "validation/failed_rewards": 1,
        "validation/accuracy": pytest.approx(2 / 3),
        "validation/reward": pytest.approx(2 / 3),
        "validation/length": 3,
        "validation/prompts": 4,
    }
    assert validate([1.0, None], [None, None], [0.0, 0.5])["validation/pass_at_k"] == 0.5


def test_where_every_held_out_reward_failed_there_is_no_accuracy() -> None:
    assert validate([None], [None]) == {
        "validation/answers": 2,
        "validation/failed_rewards": 2,
        "validation/length": 3,
        "validation/prompts": 2,
    }


def test_the_share_of_uniform_groups_agrees_with_what_the_batch_filters() -> None:
    groups = [
        make_group(1, [(1, 1.0, "stop"), (1, None, "stop")]),
        make_group(1, [(1, None, "stop"), (1, None, "stop")]),
        make_group(1, [(1, 1.0, "stop"), (1, 0.0, "stop")]),
    ]
    # This group is uniform, because the rollout with another reward has a NaN log-prob and is left out.
    groups.append(make_group(1, [(1, 1.0, "stop"), (1, 1.0, "stop"), (1, 0.0, "stop")]))
    groups[-1].rollouts[2].log_probs[-1] = np.nan
    batch = make_batch(groups, CONFIG, GroupMean(normalize_std=False))
    assert len(batch.outcomes.filtered["all rewards equal"]) == 2
    assert rollout_metrics(groups, batch)["groups/uniform"] == 2 / 4


def test_waste_is_counted_and_every_token_is_in_one_throughput_or_the_other() -> None:
    taught = make_group(10, [(4, 1.0, "stop"), (8, 0.0, "stop")])
    taught = RolloutGroup(replace(taught.task, id="taught"), taught.rollouts)
    uniform = make_group(10, [(3, 1.0, "stop"), (3, 1.0, "stop")])
    replaced = []
    for number in range(2):
        useless = make_group(10, [(2, 0.0, "stop"), (4, 0.0, "length")])
        replaced.append(RolloutGroup(replace(useless.task, id=f"r{number}"), useless.rollouts))
    batch = make_batch([taught, uniform], CONFIG, GroupMean(normalize_std=False))
    waste = Waste([(group, "all rewards equal") for group in replaced], surplus=3, surplus_tokens=6)
    numbers = rollout_metrics([taught, uniform, *replaced], batch)
    numbers |= sampling_metrics([taught, uniform, *replaced], batch, waste, CONFIG)
    assert {name: numbers[name] for name in numbers if name.startswith(("groups/", "tokens/"))} == {
        "groups/uniform": 0.75,
        "groups/trained": 1,
        "groups/missing": 3,
        "groups/filtered": 3,
        "groups/replaced": 2,
        "groups/surplus": 3,
        "tokens/prompt": 8 * 10,
        "tokens/generated": 12 + 6 + 2 * 6,
        "tokens/trained": 14 + 18,
        "tokens/filtered": 6 + 2 * 6,
        "tokens/surplus": 6,
        "tokens/wasted": (18 + 6) / (30 + 6),
    }
    assert turn_metrics(numbers, TIMES, generators=1)["throughput/generation"] == (30 + 6) / 4
    assert speed_metrics(numbers, TIMES, trainers=1, devices=1)["throughput/effective"] == (14 + 18) / 10
    # Without a filter there are no metrics of filtered or wasted groups.
    off = replace(CONFIG, dynamic_sampling=DynamicSamplingSection(None, 3.0))
    assert sampling_metrics([taught], batch, Waste(), off) == {}


def test_a_step_whose_rewards_all_failed_still_has_finite_numbers() -> None:
    numbers = measure_rollouts([make_group(3, [(2, None, "abort")])])
    assert all(np.isfinite(value) for value in numbers.values())
    assert (numbers["reward/failed"], numbers["tokens/trained"]) == (1, 0)


def test_each_throughput_has_the_tokens_time_and_devices_of_its_own_side() -> None:
    tokens = {"tokens/prompt": 100.0, "tokens/generated": 400.0, "tokens/trained": 600.0}
    measured = speed_metrics(tokens, TIMES, trainers=2, devices=5) | turn_metrics(tokens, TIMES, generators=4)
    assert measured == pytest.approx(
        {
            "throughput/effective": 600 / (12 - 2) / 5,
            "throughput/training": 600 / 3 / 2,
            "throughput/generation": 400 / 4 / 4,
            "idle/trainer": 1 - (3 + 1) / 10,
            "idle/generator": 1 - (4 + 1) / 10,
        }
    )


def test_a_generator_of_its_own_is_measured_by_its_own_clock() -> None:
    before = [
        EngineStats(10.0, 1.0, 100, 20, 1000, 600, at=50.0),
        EngineStats(20.0, 1.0, 200, 40, at=9.0),
        EngineStats(5.0, 0.0, 50),
    ]
    after = [
        EngineStats(13.0, 1.5, 400, 60, 1300, 840, at=54.0),
        EngineStats(26.0, 1.0, 500, 100, 100, at=15.0),
        EngineStats(1.0, 0.0, 10),
    ]
    interval = EngineInterval(before, after, devices=4)
    assert generator_metrics(interval) == pytest.approx(
        {
            "throughput/generation": 600 / 9 * 3 / 4,
            "idle/generator": 1 - 9 / 10,
            "idle/generator_refit": 0.5 / 10,
            "generator/sequences": 600 / 100,
            "generator/decode_step": 9 / 100,
            "tokens/sampled": 600,
        }
    )
    assert prefix_metrics(interval) == {"generator/prefix_hit_share": 240 / 400}
    assert engine_metrics(interval) == pytest.approx(
        {
            "engines/rate_median": (300 / 3 + 300 / 6) / 2,
            "engines/rate_slowest": 300 / 6,
            "engines/slowest": 1,
            "engines/idle_most": 1 - 3 / 4,
        }
    )
    assert engine_metrics(EngineInterval(before[:1], after[:1], devices=1)) == {}
    unheard = [EngineStats()]
    assert generator_metrics(EngineInterval(unheard, after[:1], devices=1)) == {}
    assert generator_metrics(EngineInterval(after, after, devices=4)) == {}
    without_a_cache = [[EngineStats(busy, 0.0, 9, 9, at=busy)] for busy in (1.0, 2.0)]
    assert prefix_metrics(EngineInterval(*without_a_cache, devices=1)) == {}


def test_engines_that_score_have_an_idle_share_of_their_own() -> None:
    before = [EngineStats(1.0, at=10.0), EngineStats(5.0, at=10.0), EngineStats(9.0, at=10.0)]
    # The third engine was replaced meanwhile.
    after = [EngineStats(2.0, at=14.0), EngineStats(5.0, at=14.0), EngineStats(0.5, at=14.0)]
    assert scoring_metrics("teacher", EngineInterval(before, after, devices=3)) == {"idle/teacher": 1 - 1 / 8}
    assert scoring_metrics("teacher", EngineInterval(after, after, devices=3)) == {}


@pytest.mark.parametrize(
    ("role", "phase"),
    [
        ("policy", "log_probs"),
        ("reference", "log_probs"),
        ("teacher", "teacher"),
        ("teachers.math", "teacher"),
        ("roles.judge", "roles"),
    ],
)
def test_a_role_has_a_phase_in_which_the_trainer_is_not_idle(role: str, phase: str) -> None:
    assert phase_of(role) == phase and phase in TRAINER_PHASES


def test_updates_are_averaged_but_the_mismatch_is_that_of_the_weights_that_sampled() -> None:
    updates = [{"loss": 1.0, "mismatch/kl": 0.1, "offload/to_host_gb": 2.0}, {"loss": 3.0, "mismatch/kl": 0.9}]
    assert update_metrics(updates) == {"loss": 2.0, "mismatch/kl": 0.1, "offload/to_host_gb": 2.0}
    assert update_metrics([{"offload/seconds": 2.0}] * 2) == {"offload/seconds": 4.0}


def test_a_refit_tells_its_parts() -> None:
    report = RefitReport(seconds=2.0, bytes=4_000_000_000, pack=0.5, wire=0.75, load=0.25, commit=0.125, stall=0.0625)
    assert refit_metrics(report) == {
        "refit/seconds": 2.0,
        "refit/gb_per_s": 2.0,
        "refit/pack": 0.5,
        "refit/wire": 0.75,
        "refit/load": 0.25,
        "refit/pause": 0.125,
        "refit/stall": 0.0625,
    }
    assert refit_metrics(RefitReport(seconds=9.0, rebuilt=(1,))) == {}


@pytest.mark.parametrize(
    ("further_metrics", "is_measured"),
    [
        ({}, True),
        ({"age/share_0": 1.0}, True),
        ({"age/share_0": 0.9}, False),  # the ratio is relative to older weights, from which the policy has moved
        ({"age/share_0": 0.9, "importance/mean": 1.0}, True),  # the ratio is relative to the trainer's log-probs
    ],
)
def test_the_share_that_bounds_hold_before_the_policy_moves_is_the_first_updates(
    further_metrics: dict[str, float], is_measured: bool
) -> None:
    first = {"ratio/clipped_low": 0.25, "ratio/clipped_high": 0.125, **further_metrics}
    metrics = update_metrics([first, {**first, "ratio/clipped_low": 0.75}])
    assert metrics.get("ratio/clipped_first") == (0.375 if is_measured else None)
    assert metrics["ratio/clipped_low"] == 0.5


def test_a_step_without_an_update_has_no_numbers_of_one() -> None:
    assert update_metrics([]) == {}


def test_advantages_are_told_by_mean_deviation_and_the_share_that_teaches_nothing() -> None:
    groups = [make_group(2, [(3, 1.0, "stop"), (1, 0.0, "stop")]), make_group(2, [(2, 1.0, "stop")])]
    metrics = rollout_metrics(groups, make_batch(groups, replace(CONFIG, dynamic_sampling=OFF), GroupMean(False)))
    names = ("advantage/mean", "advantage/std", "advantage/zero")
    assert [metrics[name] for name in names] == pytest.approx([0.0, (0.5 / 3) ** 0.5, 1 / 3])


def test_every_source_has_its_share_accuracy_and_reward_and_without_sources_there_are_none() -> None:
    groups = [make_group(2, [(3, 1.0, "stop"), (1, 0.0, "stop")]), make_group(2, [(2, 1.0, "stop")])]
    assert source_metrics(groups, "source") == {}
    of_a = replace(groups[0], task=replace(groups[0].task, source="a"))
    of_b = replace(groups[1], task=replace(groups[1].task, source="b"))
    assert source_metrics([of_a, of_a, of_b], "source") == pytest.approx(
        {
            "source/a/share": 2 / 3,
            "source/a/accuracy": 0.5,
            "source/a/reward": 0.5,
            "source/b/share": 1 / 3,
            "source/b/accuracy": 1.0,
            "source/b/reward": 1.0,
        }
    )
