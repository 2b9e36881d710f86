"""Rollouts and groups of them: what was sampled, token for token, and what it is worth (contract 4).

Task -> TurnRequest -> Completion -> Rollout -> RolloutGroup -> TrainingSample -> MicroBatch -> loss
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rlctl.data.tasks import Task
from rlctl.generation.requests import Completion, Finish, Purpose, RequestId, RolloutId, TurnRequest, rollout_seed
from rlctl.rewards.base import RewardInput
from rlctl.rewards.scorer import Score, Scorer

Decode = Callable[[list[list[int]]], list[str]]


@dataclass(frozen=True)
class Sampling:
    """Settings with which the groups of one purpose are sampled."""

    purpose: Purpose
    run_seed: int
    # Groups of a step, or of a validation.
    groups_per_step: int
    # Rollouts of a group.
    num_rollouts: int
    max_new_tokens: int
    temperature: float

    def requests(self, task: Task, group: int, attempt: int = 0) -> list[TurnRequest]:
        """Return the first turns of a group's rollouts."""
        ids = [RolloutId(self.purpose, task.id, group, index, attempt) for index in range(self.num_rollouts)]
        seeds = [rollout_seed(self.run_seed, each, self.groups_per_step) for each in ids]
        return [
            TurnRequest(RequestId(each), task.tokens, self.max_new_tokens, self.temperature, seed)
            for each, seed in zip(ids, seeds)
        ]


@dataclass(frozen=True)
class Rollout:
    """One attempt at a task: its trajectory of T tokens, prompt included, and its score."""

    id: RolloutId
    # int32 [T].
    tokens: NDArray[np.int32]
    # bool [T], true where the policy sampled the token.
    sampled: NDArray[np.bool_]
    # float32 [T], of the distribution that was sampled from; 0 where nothing was sampled.
    log_probs: NDArray[np.float32]
    # int32 [T], weight version that sampled the token; -1 where nothing was sampled.
    versions: NDArray[np.int32]
    # How the last turn ended.
    finish: Finish
    score: Score | None = None

    @classmethod
    def of_turn(cls, request: TurnRequest, completion: Completion) -> "Rollout":
        """Return the rollout of one turn."""
        start, length = len(request.prompt_tokens), len(request.prompt_tokens) + len(completion.tokens)
        tokens, sampled = np.empty(length, np.int32), np.arange(length) >= start
        log_probs, versions = np.zeros(length, np.float32), np.full(length, -1, np.int32)
        tokens[:start], tokens[start:] = request.prompt_tokens, completion.tokens
        log_probs[start:], versions[start:] = completion.log_probs, completion.versions
        return cls(request.id.rollout, tokens, sampled, log_probs, versions, completion.finish)

    @property
    def reward(self) -> float | None:
        """Value of the score; None if a reward failed."""
        return self.score.value if self.score else None

    @property
    def sampled_tokens(self) -> NDArray[np.int32]:
        """Tokens that the policy sampled, of all turns."""
        return self.tokens[self.sampled]

    @property
    def sampled_versions(self) -> NDArray[np.int32]:
        """Weight versions of the sampled tokens."""
        return self.versions[self.sampled]

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return int(np.count_nonzero(self.sampled))


@dataclass(frozen=True)
class RolloutGroup:
    """The rollouts of one task, in the order of their index; none if the task was dropped."""

    task: Task
    rollouts: list[Rollout]

    @property
    def scores(self) -> list[Score]:
        """Scores of the rollouts that were scored."""
        return [rollout.score for rollout in self.rollouts if rollout.score]


@dataclass
class Waste:
    """Groups that were sampled and are not trained (dynamic sampling)."""

    # Groups that teach nothing and were replaced, with the reason.
    filtered: list[tuple[RolloutGroup, str]] = field(default_factory=list)
    # Groups that a synchronous step did not need, and tokens that were sampled of them.
    surplus: int = 0
    surplus_tokens: int = 0


@dataclass(frozen=True)
class GroupScorer:
    """Scores groups; may be called from several threads."""

    scorer: Scorer
    decode: Decode

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with a score for each rollout."""
        texts = iter(self.decode([one.sampled_tokens.tolist() for group in groups for one in group.rollouts]))
        items = [
            RewardInput(group.task.text, next(texts), group.task.answer, group.task.row)
            for group in groups
            for _ in group.rollouts
        ]
        scores = iter(self.scorer.score(items))
        return [
            replace(group, rollouts=[replace(rollout, score=next(scores)) for rollout in group.rollouts])
            for group in groups
        ]


def sample_item(task: Task) -> RewardInput:
    """Return what rewards are tried on before a run: a task, answered with its own answer."""
    return RewardInput(task.text, task.answer or "", task.answer, task.row)
