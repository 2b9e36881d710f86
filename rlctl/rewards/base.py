"""Interface of a reward: a function and how it is called, its input, its outcome, its errors."""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlctl.config.errors import UserError
from rlctl.config.grpo_schema import RewardSection
from rlctl.utils.user_code import (
    defined_at,
    error_text,
    finite_number,
    raised_at,
    several_numbers,
    shorten_text,
    trace_of,
)

# Kind of the failure of a function that gets the instances of environments, called without an episode.
NEEDS_EPISODE = "takes environments, and there is no episode"
RewardFunction = Callable[[str, str, str | None, dict[str, Any]], float]


class RewardError(UserError):
    """A reward that cannot be used; one line for the user."""


class UnusableError(RewardError):
    """Rewards that cannot be used. problems: (index of the reward, reason); index None: not known."""

    def __init__(self, problems: list[tuple[int | None, str]], sections: list[RewardSection]) -> None:
        lines = (reason if index is None else f"{sections[index].name}: {reason}" for index, reason in problems)
        super().__init__("\n".join(lines))
        self.problems = problems


@dataclass(frozen=True)
class RewardInput:
    """One rollout to score: texts of prompt and completion, the reference answer, the data set's row."""

    prompt: str
    completion: str
    answer: str | None
    row: dict[str, Any]
    # Messages of the prompt and of the completion if the prompt is a chat; a text has none.
    prompt_messages: list[dict[str, Any]] = field(default_factory=list)
    completion_messages: list[dict[str, Any]] = field(default_factory=list)
    # The end of the prompt of an episode's last turn, and that turn. None: `prompt` and `completion` are the turn.
    last_prompt: str | None = None
    last_turn: str | None = None


@dataclass(frozen=True)
class Reward:
    """A reward: its function, the user's or a built-in one, and how it is called."""

    function: Callable[..., Any]
    # Returns the value of one rollout.
    call: Callable[[RewardInput], Any]
    # True if None is a value: the reward does not judge the rollout.
    may_abstain: bool = False

    @classmethod
    def of_function(cls, function: Callable[..., Any]) -> "Reward":
        """Return a reward that is called with (prompt, completion, answer, row)."""
        return cls(function, lambda item: function(item.prompt, item.completion, item.answer, item.row))

    @classmethod
    def of_last_turn(cls, function: Callable[..., Any]) -> "Reward":
        """Return a reward of the final answer: it is called with the policy's last turn and the end of its prompt."""

        def call(item: RewardInput) -> Any:
            prompt = item.prompt if item.last_prompt is None else item.last_prompt
            completion = item.completion if item.last_turn is None else item.last_turn
            return function(prompt, completion, item.answer, item.row)

        return cls(function, call)


@dataclass(frozen=True)
class RewardFailure:
    """Reason why an item has no value."""

    # Free of the rollout's own text.
    kind: str
    # file:line of the user's code.
    where: str = ""
    # Text of this rollout: a line of at most `MAX_DETAIL` characters.
    detail: str = ""
    # Traceback of at most `MAX_TRACE` characters.
    trace: str = ""

    @property
    def cause(self) -> str:
        """Kind and place. Failures of one cause are counted together."""
        return f"{self.kind} at {self.where}" if self.where else self.kind

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}" if self.detail else self.cause


# None: the reward does not judge the rollout.
Outcome = float | RewardFailure | None


def attempt(reward: Reward, item: RewardInput) -> Outcome:
    """Return the finite number that `reward` gives `item`, None where it does not judge it, or its failure."""
    function = reward.function
    try:
        value: object = reward.call(item)
        number = finite_number(value)
    except RewardError as error:
        kind, _, detail = str(error).partition(": ")
        return RewardFailure(kind, detail=shorten_text(detail))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too
        where = raised_at(error, function, __file__)
        return RewardFailure(f"raised {type(error).__name__}", where, error_text(error), trace_of(error))
    if number is not None or (value is None and reward.may_abstain):
        return number
    detail = shorten_text(f"returned {reprlib.repr(value)}") + several_numbers(value)
    return RewardFailure("no finite number", defined_at(function), detail)
