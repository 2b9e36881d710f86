"""Figures of scored groups: the run's own metrics unchanged, failures apart, task by task for comparisons."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.data.tasks import Task
from rlctl.evaluation.comparison import NotComparable, compare, pair, results_of
from rlctl.evaluation.figures import figures, task_results
from rlctl.evaluation.store import EvaluationError, EvaluationFolder
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest
from rlctl.grpo.metrics import validation_metrics
from rlctl.rewards.scorer import Score
from rlctl.rollout.types import Rollout, RolloutGroup
from rlctl.run.checkpoints import Checkpoints


def rollout(task: str, index: int, reward: float | None, length: int = 3, is_cut: bool = False) -> Rollout:
    request = TurnRequest(RequestId(RolloutId("validation", task, 0, index)), [1], 4, 0.0, 0)
    completion = Completion(
        tokens=np.zeros(length, np.int32),
        log_probs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        finish="length" if is_cut else "stop",
    )
    failed = "exact: raised KeyError: 'x'" if reward is None else None
    score = Score(reward, {"exact": reward}, failed, right=reward == 1.0)
    return replace(Rollout.from_turn(request, completion), score=score)


def group(name: str, *rewards: float | None) -> RolloutGroup:
    task = Task(name, [1], "", "2")
    return RolloutGroup(task, [rollout(name, index, reward) for index, reward in enumerate(rewards)])


GROUPS = [group("r0", 1.0, 0.0, 1.0, 0.0), group("r1", 0.0, 0.0, None, 0.0), group("r2", None, None, None, None)]


def test_the_metrics_are_those_of_the_runs_own_validation() -> None:
    group_figures = figures(GROUPS)
    assert group_figures["metrics"] == validation_metrics(GROUPS)
    assert group_figures["accuracy"]["value"] == group_figures["metrics"]["validation/accuracy"] == 2 / 7


def test_pass_at_k_is_of_the_tasks_that_have_k_scored_answers() -> None:
    estimates = figures(GROUPS)["pass_at"]
    assert {size: estimate["value"] for size, estimate in estimates.items()} == {"1": 1 / 4, "2": 5 / 12, "4": 1.0}


def test_failures_are_counted_by_cause_and_are_no_reward_of_0() -> None:
    group_figures = figures(GROUPS)
    assert group_figures["failures"] == {"exact: raised KeyError": 5}
    assert group_figures["unscored_tasks"] == 1
    assert group_figures["rewards"]["exact"]["failed"] == 5
    assert group_figures["reward"]["value"] == 2 / 7


def test_a_reward_has_bounds_if_all_of_its_parts_are_from_0_to_1() -> None:
    bounded = figures([group("r0", 1.0), group("r1", 1.0), group("r2", 1.0)])
    assert bounded["reward"]["bounds"] == (0.0, 1.0)
    assert bounded["reward"]["low"] == bounded["accuracy"]["low"] < 1.0
    free = figures([group("r0", 2.0), group("r1", 2.0)])
    assert free["reward"]["bounds"] is None
    assert (free["reward"]["low"], free["reward"]["note"]) == (None, "all tasks are equal: no interval")


def test_lengths_and_cuts_are_of_all_answers() -> None:
    rollouts = [rollout("r0", 0, 1.0, 2), rollout("r0", 1, 0.0, 8, is_cut=True)]
    group_figures = figures([RolloutGroup(Task("r0", [1], "", "2"), rollouts)])
    assert group_figures["length"] == {"mean": 5.0, "median": 5.0, "p90": pytest.approx(7.4), "max": 8}
    assert group_figures["truncated"] == 0.5


def test_without_a_score_there_are_no_means() -> None:
    group_figures = figures(GROUPS[2:])
    assert "accuracy" not in group_figures
    assert group_figures["failures"] == {"exact: raised KeyError": 4}


def as_result(name: str, groups: list[RolloutGroup], rows: str = "same") -> dict[str, Any]:
    return {"target": name, "data": "d", "rows": rows, "by_task": [vars(task) for task in task_results(groups)]}


def test_a_comparison_pairs_tasks_and_leaves_out_those_without_a_score() -> None:
    first = as_result("a", [group(f"r{number}", 0.0) for number in range(9)] + [group("r9", None)])
    second = as_result("b", [group(f"r{number}", 1.0) for number in range(10)])
    comparison = compare(first, second)
    assert (comparison["tasks"], comparison["left_out"]) == (9, 1)
    assert comparison["accuracy"]["mean"] == 1.0
    assert comparison["accuracy"]["p_value"] == pytest.approx(2 / 2**9)
    assert comparison["accuracy"]["more_than_chance"]
    assert compare(second, first)["accuracy"]["mean"] == -1.0


def test_results_of_other_rows_are_not_compared() -> None:
    with pytest.raises(NotComparable, match="d of a and d of b are not the same rows: no task is in both"):
        compare(as_result("a", GROUPS), as_result("b", GROUPS, rows="others"))
    with pytest.raises(NotComparable, match="no task has a score in both a and b"):
        compare(as_result("a", GROUPS[2:]), as_result("b", GROUPS))


def write_config(path: Path) -> None:
    (path / "hf").mkdir()
    (path / "hf/config.json").write_text("{}")


def test_a_checkpoint_stands_for_its_newest_result_on_rows_that_both_have(tmp_path: Path) -> None:
    for step, data, rows in ((2, "easy", "e"), (2, "hard", "h"), (4, "hard", "h")):
        folder = EvaluationFolder(tmp_path / f"sums/evals/step_{step}--{data}--01234567")
        folder.path.mkdir(parents=True)
        folder.finish([], {**as_result(f"step {step}", GROUPS, rows), "figures": {"tasks": 3}})
    (tmp_path / "sums/config.yaml").write_text("kind: grpo\n")
    for step in (2, 4, 6):
        Checkpoints(tmp_path / "sums/checkpoints", 9, 0).save(step, {}, write_config)
    second = results_of(tmp_path / "sums/checkpoints/step_2", tmp_path)
    fourth = results_of(tmp_path / "sums/evals/step_4--hard--01234567", tmp_path)
    assert {result["rows"] for result in second} == {"e", "h"}
    assert [result["rows"] for result in pair(second, fourth)] == ["h", "h"]
    sixth = tmp_path / "sums/checkpoints/step_6"
    with pytest.raises(
        EvaluationError, match=r"step_6: sums step 6 was not evaluated yet; rlctl eval .*step_6 does it"
    ):
        results_of(sixth, tmp_path)
    assert len(results_of(Path("sums"), tmp_path)) == 3
