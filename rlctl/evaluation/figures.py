"""Figures of scored held-out groups: the numbers of `rlctl eval` beyond a run's own validation metrics. Pure.

An answer whose reward failed has no value and counts nowhere but in `failures`. A task without a scored answer is left
out of every mean.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from rlctl.config.schema import GrpoConfig
from rlctl.evaluation.statistics import Bounds, Estimate, estimate, pass_at
from rlctl.grpo.metric_rows import HELD_OUT_ACCURACY, HELD_OUT_REWARD
from rlctl.grpo.metrics import validation_metrics
from rlctl.rewards.scorer import Score
from rlctl.rollout.types import RolloutGroup

# Bounds of a share.
_SHARE = (0.0, 1.0)


@dataclass(frozen=True)
class TaskResult:
    """Scored answers to one task."""

    task: str
    # Answers with a score, and the right ones.
    scored: int
    right: int
    # Mean reward of the scored ones; None without any.
    reward: float | None

    @property
    def accuracy(self) -> Fraction:
        """Share of the scored answers that are right."""
        return Fraction(self.right, self.scored)


def task_results(groups: Sequence[RolloutGroup]) -> list[TaskResult]:
    """Return the result of each task."""
    results = []
    for group in groups:
        values = [(score.value, score.right) for score in group.scores if score.value is not None]
        reward = float(np.mean([value for value, _ in values])) if values else None
        results.append(TaskResult(group.task.id, len(values), sum(right for _, right in values), reward))
    return results


def figures(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Return every figure of the groups as plain values.

    metrics: the run's own validation metrics. accuracy (avg@k with k answers to a task), pass_at (by k), reward,
    rewards (by name): each with its interval. length, truncated, failures (by cause) of all answers.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics, lengths = validation_metrics(groups), np.array([rollout.num_sampled for rollout in rollouts])
    tasks = [task for task in task_results(groups) if task.scored]
    scores = [score for group in groups for score in group.scores]
    found: dict[str, Any] = {
        "metrics": metrics,
        "tasks": len(groups),
        "answers": len(rollouts),
        "unscored_tasks": len(groups) - len(tasks),
        "length": {
            "mean": float(lengths.mean()),
            "median": float(np.median(lengths)),
            "p90": float(np.percentile(lengths, 90)),
            "max": int(lengths.max()),
        },
        "truncated": float(np.mean([rollout.is_cut for rollout in rollouts])),
        "failures": dict(Counter(_cause(score.failed) for score in scores if score.failed).most_common()),
    }
    if not tasks:
        return found
    accuracy = estimate(metrics[HELD_OUT_ACCURACY.name], [float(task.accuracy) for task in tasks], _SHARE)
    rewards, bounds = [task.reward for task in tasks if task.reward is not None], _sum_bounds(scores)
    return found | {
        "accuracy": asdict(accuracy),
        "pass_at": {str(k): asdict(each) for k, each in _pass_at(tasks)},
        "reward": asdict(estimate(metrics[HELD_OUT_REWARD.name], rewards, bounds)) | {"bounds": bounds},
        "rewards": _reward_means(groups),
    }


def result_of(
    groups: Sequence[RolloutGroup], config: GrpoConfig, rows: str, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the result of scored groups: the facts, the settings, the figures, and each task's own numbers.

    facts: known facts of the answers; they override the config.
    """
    settings = {
        "generations": max(len(group.rollouts) for group in groups),
        "temperature": config.validation.temperature,
        "top_p": config.generation.top_p,
        "top_k": config.generation.top_k,
        "max_new_tokens": config.generation.max_new_tokens,
        "seed": config.run.seed,
        "scored_by": [f"{each.name} x {each.weight:g}" for each in config.rewards],
    }
    by_task = [asdict(task) for task in task_results(groups)]
    return {**settings, **facts, "rows": rows, "figures": figures(groups), "by_task": by_task}


def _pass_at(tasks: Sequence[TaskResult]) -> Iterator[tuple[int, Estimate]]:
    """Yield pass@k for k = 1, 2, 4, ... and the number of answers; tasks with fewer scored answers are left out."""
    most = max(task.scored for task in tasks)
    for k in sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most}):
        enough = [task for task in tasks if task.scored >= k]
        values = [pass_at(k, task.scored, task.right) for task in enough]
        yield k, estimate(float(np.mean(values)), values, _SHARE)


def _reward_means(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Return the mean of each reward before its weight, and its failures, by name."""
    names = dict.fromkeys(name for group in groups for score in group.scores for name in score.parts)
    found: dict[str, Any] = {}
    for name in names:
        by_task = [_part_values(group.scores, name) for group in groups]
        values = [value for part in by_task for value in part]
        failed = sum(len(group.scores) for group in groups) - len(values)
        means = [float(np.mean(part)) for part in by_task if part]
        bounds = _SHARE if values and _SHARE[0] <= min(values) and max(values) <= _SHARE[1] else None
        found[name] = {"failed": failed} | (asdict(estimate(float(np.mean(values)), means, bounds)) if values else {})
    return found


def _sum_bounds(scores: Sequence[Score]) -> Bounds | None:
    """Return the least and the greatest weighted sum if every single reward is from 0 to 1; else None.

    A reward from 0 to 1 is taken for one that cannot leave this range, as nearly all rewards of verifiers are.
    """
    scored = [score for score in scores if score.value is not None]
    weights = {name: score.weights.get(name, 1.0) for score in scored for name in score.parts}
    low, high = sum(min(0.0, each) for each in weights.values()), sum(max(0.0, each) for each in weights.values())
    parts = [part for score in scored for part in score.parts.values() if part is not None]
    # A sum beyond them is of something that is no part.
    values = [score.value for score in scored if score.value is not None]
    whole = all(0.0 <= part <= 1.0 for part in parts) and all(low - 1e-9 <= value <= high + 1e-9 for value in values)
    return (low, high) if whole and low < high else None


def _part_values(scores: Sequence[Score], name: str) -> list[float]:
    return [value for score in scores if (value := score.parts.get(name)) is not None]


def _cause(failed: str) -> str:
    """Return the reward and the cause of a failure, without the text of one rollout."""
    return ": ".join(failed.split(": ")[:2])
