"""Metrics of episodes: turns, tools, the environment's time, how they ended, and reward by the number of turns."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from rlctl.rollout.types import RolloutGroup


def environment_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the metrics of a step's or a validation's episodes; empty without an environment.

    An episode that failed counts as such alone: it has no turns, and no reward.
    """
    rollouts = [(one, one.episode) for group in groups for one in group.rollouts if one.episode]
    played = [(one, episode) for one, episode in rollouts if episode.ending != "failed"]
    if not rollouts:
        return {}
    metrics = {
        "environment/failed": float(len(rollouts) - len(played)),
        "environment/retries": float(sum(episode.failures for _, episode in played)),
    }
    if not played:
        return metrics
    for name in ("turns", "tool_calls"):
        metrics[f"environment/{name}"] = float(np.mean([getattr(episode, name) for _, episode in played]))
    calls, errors = (sum(getattr(episode, name) for _, episode in played) for name in ("tool_calls", "tool_errors"))
    metrics["environment/tool_errors"] = errors / max(1, calls)
    metrics["environment/seconds"] = float(np.mean([episode.environment_s for _, episode in played]))
    metrics["environment/rows"] = float(np.mean([len(one.rows) for one, _ in played]))
    endings = Counter(episode.ending for _, episode in played)
    metrics |= {f"environment/endings/{name}": count / len(played) for name, count in sorted(endings.items())}
    by_turns = defaultdict[int, list[float]](list)
    for one, episode in played:
        if one.reward is not None:
            by_turns[episode.turns].append(one.reward)
    return metrics | {f"reward/turns_{turns}": float(np.mean(of)) for turns, of in sorted(by_turns.items())}
