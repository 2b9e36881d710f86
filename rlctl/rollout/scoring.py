"""Scores of whole groups: their texts decoded, their rewards summed."""

from collections.abc import Callable
from dataclasses import dataclass

from rlctl.data.tasks import Task
from rlctl.generation.requests import Rollout
from rlctl.rewards.base import RewardInput
from rlctl.rewards.scorer import Score, Scorer

Decode = Callable[[list[list[int]]], list[str]]


def sample_item(prompt: Task) -> RewardInput:
    """What rewards are tried on before a run: a prompt, answered with its own answer."""
    return RewardInput(prompt.text, prompt.answer or "", prompt.answer, prompt.row)


@dataclass(frozen=True)
class RolloutGroup:
    """A prompt's rollouts and their scores, side by side."""

    prompt: Task
    completions: list[Rollout]
    scores: list[Score]


@dataclass(frozen=True)
class GroupScorer:
    """Called with prompts and their rollouts; may be called from several threads."""

    scorer: Scorer
    decode: Decode

    def __call__(self, prompts: list[Task], completions: list[list[Rollout]]) -> list[list[Score]]:
        """A score a rollout, group by group."""
        texts = iter(self.decode([c.tokens.tolist() for group in completions for c in group]))
        items = [
            RewardInput(p.text, next(texts), p.answer, p.row) for p, group in zip(prompts, completions) for _ in group
        ]
        scores = iter(self.scorer.score(items))
        return [[next(scores) for _ in group] for group in completions]
