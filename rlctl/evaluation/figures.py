"""Figures of scored held-out groups: what `rlctl eval` says beyond a run's own validation metrics. Pure.

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
from rlctl.evaluation.statistics import Estimate, mean, pass_at, share
from rlctl.grpo.metrics import validation_metrics
from rlctl.rewards.scorer import Score
from rlctl.rollout.types import RolloutGroup


@dataclass(frozen=True)
class TaskResult:
    """Scored answers to one task."""

    task: str
    # Answers that have a score, and those of them that are right.
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
    answers = sum(task.scored for task in tasks)
    accuracy = share(metrics["validation/accuracy"], [float(task.accuracy) for task in tasks], answers)
    return found | {
        "accuracy": asdict(accuracy),
        "pass_at": {str(k): asdict(estimate) for k, estimate in _pass_at(tasks)},
        "reward": asdict(
            mean(metrics["validation/reward"], [task.reward for task in tasks if task.reward is not None])
        ),
        "rewards": _rewards(groups),
    }


def result_of(
    groups: Sequence[RolloutGroup], config: GrpoConfig, rows: str, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the result of scored groups: the facts, the settings, the figures, and each task's own numbers.

    facts: what is known of the answers; it goes before what the config says.
    """
    settings = {
        "generations": max(len(group.rollouts) for group in groups),
        "temperature": config.validation.temperature,
        "max_new_tokens": config.generation.max_new_tokens,
        "seed": config.run.seed,
    }
    by_task = [asdict(task) for task in task_results(groups)]
    return {**settings, **facts, "rows": rows, "figures": figures(groups), "by_task": by_task}


def _pass_at(tasks: Sequence[TaskResult]) -> Iterator[tuple[int, Estimate]]:
    """Yield pass@k for k = 1, 2, 4, ... and the number of answers; tasks with fewer scored answers are left out."""
    most = max(task.scored for task in tasks)
    for k in sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most}):
        enough = [task for task in tasks if task.scored >= k]
        values = [pass_at(k, task.scored, task.right) for task in enough]
        yield k, share(float(np.mean(values)), values, sum(task.scored for task in enough) // k)


def _rewards(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Return the mean of each reward before its weight, and its failures, by name."""
    names = dict.fromkeys(name for group in groups for score in group.scores for name in score.parts)
    found: dict[str, Any] = {}
    for name in names:
        by_task = [_values(group.scores, name) for group in groups]
        values = [value for part in by_task for value in part]
        failed = sum(len(group.scores) for group in groups) - len(values)
        means = [float(np.mean(part)) for part in by_task if part]
        found[name] = {"failed": failed} | (asdict(mean(float(np.mean(values)), means)) if values else {})
    return found


def _values(scores: Sequence[Score], name: str) -> list[float]:
    return [value for score in scores if (value := score.parts.get(name)) is not None]


def _cause(failed: str) -> str:
    """Return the reward and the cause of a failure, without the text of one rollout."""
    return ": ".join(failed.split(": ")[:2])
