"""Rollouts and groups: the exact tokens that were sampled, and their scores (contract 4).

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
# Reason why an episode ended. done: the environment ended it. answered: the policy called no tool. max_turns,
# max_length, time: this budget was used up. failed: the environment failed too often.
Ending = Literal["done", "answered", "max_turns", "max_length", "time", "failed"]
# Endings at a budget. The episode might have continued.
CUT: tuple[Ending, ...] = ("max_turns", "max_length", "time")


@dataclass(frozen=True)
class RolloutStart:
    """Specification of one rollout: all that a player needs to begin it."""

    id: RolloutId
    task: Task
    # Most tokens sampled in one turn.
    max_new_tokens: int
    temperature: float
    # Seed of the rollout; `turn_seed` derives each turn's seed from it.
    seed: int
    # Seed of the environment, equal for the rollouts of a group.
    group_seed: int


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one purpose, such as training or validation."""

    purpose: Purpose
    run_seed: int
    # Number of groups in a step, or in a validation.
    groups_per_step: int
    # Number of rollouts in a group.
    num_rollouts: int
    max_new_tokens: int
    temperature: float

    def starts(self, task: Task, group: int, attempt: int = 0) -> list[RolloutStart]:
        """Return the specifications of a group's rollouts."""
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
        """Return the seed of a group's environments. A held-out task has the same seed in every validation.

        first: the group's first rollout.
        """
        place = first.group if first.purpose == "train" else first.group % self.groups_per_step
        return rollout_seed(self.run_seed, replace(first, group=place), self.groups_per_step)


@dataclass(frozen=True)
class PlayedEpisode:
    """Record of an episode: its conversation, its ending and its counts. Plain values, for checkpoints and records."""

    # The conversation as text. Its first `opening` messages are the first prompt.
    messages: list[Message]
    opening: int
    ending: Ending
    turns: int
    # Reward from the environment; None if it gives none, or if the episode failed.
    reward: Reward | None
    # Last failure of the environment; None if the episode did not fail in the end.
    failure: str | None
    # Number of tries that failed.
    failures: int
    # Sums over all tries: seconds spent waiting for the environment, tool calls, and failed tool calls (malformed, or
    # the tool raised).
    environment_s: float
    tool_calls: int
    tool_errors: int
    # Failed tool calls in which the tool's own code raised.
    tool_raised: int = 0
    # Number of control tokens (such as <|im_end|>) in texts of rows, environment or tools; they are encoded as text.
    spelled: int = 0
    # Number of malformed tool calls among the failed ones, including text that only looks like a call.
    malformed_calls: int = 0
    # Seconds of an agent's longest wait for a turn.
    longest_turn_s: float = 0.0
    # Counts of an agent's session by name, such as `coalesced`; logged as metrics `agent/NAME`.
    counts: Mapping[str, float] | None = None
    # Reason why a request of an agent continued no earlier turn -> number of such requests.
    rewritten: Mapping[str, int] | None = None
    # Number of messages that the chat template left out: the policy did not see these messages.
    unwritten: int = 0


@dataclass(frozen=True)
class Rollout:
    """One attempt at a task: its rows for training, and its score.

    The properties with T tokens concatenate the columns of all rows.
    """

    id: RolloutId
    # One row, or several if the history was rewritten on the way; empty if the episode failed.
    rows: Sequence[TrajectoryRow]
    # Reason why the last turn ended.
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
        """True if the rollout ended at a limit: on the tokens of its last turn, or a budget of the episode."""
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
        """Sampled tokens of all turns, int32."""
        return self.tokens[self.sampled]

    @property
    def sampled_versions(self) -> NDArray[np.int32]:
        """Weight versions of the sampled tokens, int32."""
        return self.versions[self.sampled]

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens of all rows. Cached, because the buffer reads it often."""
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

    @property
    def stop(self) -> str | None:
        """Reason of a reward why the run must stop before it trains on the group; None if it need not."""
        return next((score.stop for score in self.scores if score.stop), None)


@dataclass
class Waste:
    """Groups that were sampled and are not trained (dynamic sampling)."""

    # Groups that teach nothing and were replaced, each with the reason.
    filtered: list[tuple[RolloutGroup, str]] = field(default_factory=list)
    # Number of groups that a synchronous step began and did not need, and number of their sampled tokens.
    surplus: int = 0
    surplus_tokens: int = 0


def _concatenate(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
