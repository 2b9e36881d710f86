"""Figures of scored held-out groups: the numbers that `rlctl eval` adds to a run's validation metrics. Pure.

An answer whose reward failed has no score, and counts only in `failures`. A task without a scored answer is left out of
every mean.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np

from rlctl.config.schema import GrpoConfig
from rlctl.evaluation.statistics import Bounds, Estimate, estimate, pass_at
from rlctl.grpo.metric_rows import HELD_OUT_ACCURACY, HELD_OUT_REWARD
from rlctl.grpo.metrics import validation_metrics
from rlctl.rewards.scorer import Score
from rlctl.rollout.types import RolloutGroup

# Least and greatest value of a share.
_SHARE = (0.0, 1.0)


@dataclass(frozen=True)
class TaskResult:
    """Scored answers to one task."""

    # Id of the task.
    task: str
    # Number of answers with a score.
    scored: int
    # Number of right answers.
    right: int
    # Mean reward of the scored answers; None if no answer has a score.
    reward: float | None

    @property
    def accuracy(self) -> Fraction:
        """Share of the scored answers that are right."""
        return Fraction(self.right, self.scored)


def task_results(groups: Sequence[RolloutGroup]) -> list[TaskResult]:
    """Return the result of each task."""
    results = []
    for group in groups:
        rewards = [score.value for score in group.scores if score.value is not None]
        right = sum(score.right for score in group.scores if score.value is not None)
        reward = float(np.mean(rewards)) if rewards else None
        results.append(TaskResult(task=group.task.id, scored=len(rewards), right=right, reward=reward))
    return results


def figures(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Return the figures of the groups as JSON data, with these keys.

    metrics: the run's own validation metrics. accuracy (avg@k with k answers to a task), pass_at (by k), reward,
    rewards (by name): each with an interval. length, truncated, failures (by cause): of all answers. tasks, answers,
    unscored_tasks: numbers.
    """
    rollouts = list(chain.from_iterable(group.rollouts for group in groups))
    scores = list(chain.from_iterable(group.scores for group in groups))
    lengths = np.array([rollout.num_sampled for rollout in rollouts])
    metrics = validation_metrics(groups)
    scored_tasks = [task for task in task_results(groups) if task.scored]
    figures: dict[str, Any] = {
        "metrics": metrics,
        "tasks": len(groups),
        "answers": len(rollouts),
        "unscored_tasks": len(groups) - len(scored_tasks),
        "length": {
            "mean": float(lengths.mean()),
            "median": float(np.median(lengths)),
            "p90": float(np.percentile(lengths, 90)),
            "max": int(lengths.max()),
        },
        "truncated": float(np.mean([rollout.is_cut for rollout in rollouts])),
        "failures": dict(Counter(_cause(score.failed) for score in scores if score.failed).most_common()),
    }
    if not scored_tasks:
        return figures
    accuracy = estimate(metrics[HELD_OUT_ACCURACY.name], [float(task.accuracy) for task in scored_tasks], _SHARE)
    rewards = [task.reward for task in scored_tasks if task.reward is not None]
    bounds = _sum_bounds(scores)
    return figures | {
        "accuracy": asdict(accuracy),
        "pass_at": {str(k): asdict(pass_at_k) for k, pass_at_k in _pass_at(scored_tasks)},
        "reward": asdict(estimate(metrics[HELD_OUT_REWARD.name], rewards, bounds)) | {"bounds": bounds},
        "rewards": _reward_means(groups),
    }


def result_of(
    groups: Sequence[RolloutGroup], config: GrpoConfig, rows: str, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the result of scored groups as JSON data: facts, settings, figures, and the numbers of each task.

    rows: digest of the rows. facts: facts of the answers, such as the target. They replace settings of the config.
    """
    settings = {
        "generations": max(len(group.rollouts) for group in groups),
        "temperature": config.validation.temperature,
        "top_p": config.generation.top_p,
        "top_k": config.generation.top_k,
        "max_new_tokens": config.generation.max_new_tokens,
        "seed": config.run.seed,
        "scored_by": [f"{reward.name} x {reward.weight:g}" for reward in config.rewards],
    }
    by_task = [asdict(task) for task in task_results(groups)]
    return {**settings, **facts, "rows": rows, "figures": figures(groups), "by_task": by_task}


def _pass_at(tasks: Sequence[TaskResult]) -> Iterator[tuple[int, Estimate]]:
    """Yield (k, pass@k) for k = 1, 2, 4, ... and for the number of answers to a task.

    Tasks with fewer than k scored answers are left out.
    """
    largest = max(task.scored for task in tasks)
    powers = {2**exponent for exponent in range(largest.bit_length())}
    for k in sorted(powers | {largest}):
        shares = [pass_at(k, task.scored, task.right) for task in tasks if task.scored >= k]
        yield k, estimate(float(np.mean(shares)), shares, _SHARE)


def _reward_means(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Return by name the mean of each reward without its weight, and the number of its failures."""
    scores = list(chain.from_iterable(group.scores for group in groups))
    names = dict.fromkeys(chain.from_iterable(score.parts for score in scores))
    means: dict[str, Any] = {}
    for name in names:
        rewards_by_task = [_part_values(group.scores, name) for group in groups]
        rewards = list(chain.from_iterable(rewards_by_task))
        means[name] = {"failed": len(scores) - len(rewards)}
        if rewards:
            task_means = [float(np.mean(task_rewards)) for task_rewards in rewards_by_task if task_rewards]
            is_share = _SHARE[0] <= min(rewards) and max(rewards) <= _SHARE[1]
            means[name] |= asdict(estimate(float(np.mean(rewards)), task_means, _SHARE if is_share else None))
    return means


def _sum_bounds(scores: Sequence[Score]) -> Bounds | None:
    """Return the least and the greatest possible weighted sum if every measured reward is from 0 to 1; else None.

    Such rewards are assumed to have 0 and 1 as bounds, as nearly all rewards of verifiers do.
    """
    # Weight of each reward by name.
    weights: dict[str, float] = {}
    # Rewards before the weighted sums, and these sums.
    parts: list[float | None] = []
    sums: list[float] = []
    for score in scores:
        if score.value is not None:
            weights |= {name: score.weights.get(name, 1.0) for name in score.parts}
            parts += score.parts.values()
            sums.append(score.value)
    low = sum(min(0.0, weight) for weight in weights.values())
    high = sum(max(0.0, weight) for weight in weights.values())
    are_shares = all(part is None or 0.0 <= part <= 1.0 for part in parts)
    # A sum beyond these bounds has a summand that is not among the parts, so its bounds are not known.
    are_within = all(low - 1e-9 <= weighted_sum <= high + 1e-9 for weighted_sum in sums)
    return (low, high) if are_shares and are_within and low < high else None


def _part_values(scores: Sequence[Score], name: str) -> list[float]:
    parts = [score.parts.get(name) for score in scores]
    return [part for part in parts if part is not None]


def _cause(failed: str) -> str:
    """Return the reward's name and the cause in a failure's text, without the text of its rollout."""
    return ": ".join(failed.split(": ")[:2])
