"""Soft penalty on the reward of answers near the maximal length (DAPO, arXiv 2503.14476, section 3.4)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlctl.config.plugins import OVERLONG
from rlctl.config.schema import GrpoConfig
from rlctl.rewards.scorer import Score
from rlctl.rollout.buffer import ScoreGroups
from rlctl.rollout.types import Rollout, RolloutGroup


def soft_penalty(length: int, longest: int, tokens: int, penalty: float) -> float:
    """Return the number from -`penalty` to 0 that is added to the reward of an answer of `length` sampled tokens.

    The number is `penalty` times the value below, with L_max = `longest` and L_cache = `tokens` (DAPO, arXiv
    2503.14476, equation 13):

        0                                         length <= L_max - L_cache
        ((L_max - L_cache) - length) / L_cache    L_max - L_cache < length <= L_max
        -1                                        L_max < length
    """
    return -penalty * min(1.0, max(0.0, (length - (longest - tokens)) / tokens))


@dataclass(frozen=True)
class OverlongPenalty:
    """Scores training groups, and adds the length penalty to the rewards. Validation does not use it."""

    # Scores groups without the penalty.
    score: ScoreGroups
    # Arguments of `soft_penalty`.
    longest: int
    tokens: int
    penalty: float

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with scores, whose part `overlong` is the penalty. A failed score stays without a value."""
        return [
            replace(group, rollouts=[replace(rollout, score=self._punish(rollout)) for rollout in group.rollouts])
            for group in self.score(groups)
        ]

    def _punish(self, rollout: Rollout) -> Score | None:
        """Return the rollout's score with the penalty; None for a rollout without a score."""
        score = rollout.score
        if score is None:
            return None
        penalty = soft_penalty(rollout.num_sampled, self.longest, self.tokens, self.penalty)
        value = None if score.value is None else score.value + penalty
        return replace(score, value=value, parts={**score.parts, OVERLONG: penalty})


def training_score(config: GrpoConfig, score: ScoreGroups) -> ScoreGroups:
    """Return the function that scores training groups: `score`, or `score` plus the config's length penalty."""
    rules = config.grpo.overlong
    if rules.penalty_tokens is None:
        return score
    return OverlongPenalty(score, config.generation.max_new_tokens, rules.penalty_tokens, rules.penalty)
