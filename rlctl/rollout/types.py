"""Rollouts and groups: sampled tokens, exactly, and scores (contract 4).

Task -> RolloutStart -> TurnRequest -> Completion -> Rollout -> RolloutGroup -> TrainingSample -> MicroBatch -> loss
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlctl.data.tasks import Task
from rlctl.environments.contract import Message, Reward
from rlctl.generation.requests import Completion, Finish, Purpose, RolloutId, TurnRequest, rollout_seed
from rlctl.rewards.scorer import Score
from rlctl.rollout.conversation import TrajectoryRow

Decode = Callable[[list[list[int]]], list[str]]
# Why an episode ended: the environment said so; the policy called no tool; a budget was used up; it failed too often.
Ending = Literal["done", "answered", "max_turns", "max_length", "time", "failed"]
# Endings at a budget: the episode might have gone on.
CUT: tuple[Ending, ...] = ("max_turns", "max_length", "time")


@dataclass(frozen=True)
class RolloutStart:
    """One rollout to begin."""

    id: RolloutId
    task: Task
    # Tokens of one turn.
    max_new_tokens: int
    temperature: float
    # Seed of the first turn; that of a further one follows from it.
    seed: int
    # Seed of the environment, equal for the rollouts of a group.
    group_seed: int


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

    def starts(self, task: Task, group: int, attempt: int = 0) -> list[RolloutStart]:
        """Return the rollouts of a group, to begin."""
        ids = [RolloutId(self.purpose, task.id, group, index, attempt) for index in range(self.num_rollouts)]
        group_seed = self._environment_seed(ids[0])
        return [
            RolloutStart(
                id=rollout_id,
                task=task,
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
                seed=rollout_seed(self.run_seed, rollout_id, self.groups_per_step),
                group_seed=group_seed,
            )
            for rollout_id in ids
        ]

    def _environment_seed(self, first: RolloutId) -> int:
        """Return the seed of a group's environments; that of a held-out task is the same in every validation.

        first: the group's first rollout.
        """
        place = first.group if first.purpose == "train" else first.group % self.groups_per_step
        return rollout_seed(self.run_seed, replace(first, group=place), self.groups_per_step)


@dataclass(frozen=True)
class PlayedEpisode:
    """Course of a rollout that an environment played. Plain values, for checkpoints and records."""

    # The conversation, as a person reads it; the first `opening` messages are the first prompt.
    messages: list[Message]
    opening: int
    ending: Ending
    turns: int
    # Value that the environment gave; None if it gives none, or if the episode failed.
    reward: Reward | None
    # Last failure of the environment; None if the episode did not fail in the end.
    failure: str | None
    # Tries that failed.
    failures: int
    # All tries: the environment's seconds, calls, and failed calls (malformed, or the tool raised).
    environment_s: float
    tool_calls: int
    tool_errors: int
    # Calls among the latter in which the tool's own code raised.
    tool_raised: int = 0
    # Control tokens spelled by rows, environment or tools, and encoded as text.
    spelled: int = 0
    # Malformed calls among the failed ones, text in the shape of a call included.
    malformed_calls: int = 0
    # Seconds of an agent's longest wait for a turn.
    longest_turn_s: float = 0.0
    # Counts of an agent's session by name, as `coalesced`; metrics have them below `agent/`.
    counts: Mapping[str, float] | None = None
    # Why an agent's requests continued no turn -> how often.
    rewritten: Mapping[str, int] | None = None
    # Messages that the chat template left out, so that the policy did not see them.
    unwritten: int = 0


@dataclass(frozen=True)
class Rollout:
    """One attempt at a task: its rows for training, and its score.

    Arrays of T tokens are of all rows, one row after the other.
    """

    id: RolloutId
    # One, unless history was rewritten on the way; none if the episode failed.
    rows: Sequence[TrajectoryRow]
    # Ending of the last turn.
    finish: Finish
    score: Score | None = None
    # None for a rollout of one prompt and one answer.
    episode: PlayedEpisode | None = None

    @classmethod
    def from_turn(cls, request: TurnRequest, completion: Completion) -> "Rollout":
        """Return the rollout of one turn."""
        start = len(request.prompt_tokens)
        length = start + len(completion.tokens)
        tokens = np.empty(length, np.int32)
        tokens[:start] = request.prompt_tokens
        tokens[start:] = completion.tokens
        sampled = np.zeros(length, np.bool_)
        sampled[start:] = True
        log_probs = np.zeros(length, np.float32)
        log_probs[start:] = completion.log_probs
        versions = np.full(length, -1, np.int32)
        versions[start:] = completion.versions
        turns = np.full(length, -1, np.int16)
        turns[start:] = 0
        row = TrajectoryRow(tokens=tokens, sampled=sampled, log_probs=log_probs, versions=versions, turns=turns)
        return cls(request.id.rollout, (row,), completion.finish)

    @property
    def reward(self) -> float | None:
        """Value of the score; None if a reward failed."""
        return self.score.value if self.score else None

    @property
    def is_cut(self) -> bool:
        """True if it ended at a budget: of its last turn's tokens, or of the episode."""
        return self.finish == "length" or (self.episode is not None and self.episode.ending in CUT)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Tokens, int32 [T]."""
        return _concatenate([row.tokens for row in self.rows], np.int32)

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """True where the policy sampled the token, bool [T]."""
        return _concatenate([row.sampled for row in self.rows], np.bool_)

    @property
    def log_probs(self) -> NDArray[np.float32]:
        """Log-probs of the distribution that was sampled from, float32 [T]; 0 where nothing was sampled."""
        return _concatenate([row.log_probs for row in self.rows], np.float32)

    @property
    def versions(self) -> NDArray[np.int32]:
        """Weight versions that sampled the tokens, int32 [T]; -1 where nothing was sampled."""
        return _concatenate([row.versions for row in self.rows], np.int32)

    @property
    def sampled_tokens(self) -> NDArray[np.int32]:
        """Tokens that the policy sampled, of all turns."""
        return self.tokens[self.sampled]

    @property
    def sampled_versions(self) -> NDArray[np.int32]:
        """Weight versions of the sampled tokens."""
        return self.versions[self.sampled]

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens of all rows. Cached for the buffer."""
        return sum(len(row.tokens) for row in self.rows)

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
    # Surplus groups of a synchronous step, and their sampled tokens.
    surplus: int = 0
    surplus_tokens: int = 0


def _concatenate(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
