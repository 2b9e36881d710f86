"""Interface of a reward: the function with its way of calling, its input, its outcome and its errors."""

import reprlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlctl.config.errors import UserError
from rlctl.config.grpo_schema import AnyRewardSection
from rlctl.utils.user_code import (
    defined_at,
    error_text,
    finite_number,
    raised_at,
    several_numbers,
    shorten_text,
    trace_of,
)

# Kind of the failure if a function with a parameter `environments` is called without an episode.
NEEDS_EPISODE = "takes environments, and there is no episode"
# (prompt, completion, answer, row) -> value.
RewardFunction = Callable[[str, str, str | None, dict[str, Any]], float]
# (question, most tokens, temperature) -> answer with `text`, `input_tokens` and `output_tokens`, or with a `problem`.
AskModel = Callable[[str, int, float], Awaitable[dict[str, Any]]]
# plain: an ordinary function, called for one rollout at a time. coroutine: an `async def` for one rollout; many run at
# once. group: an `async def` for all rollouts of a task; many run at once.
Form = Literal["plain", "coroutine", "group"]


class RewardError(UserError):
    """A reward that cannot be used. The text is one line for the user."""


class StopRunError(RewardError):
    """The run must stop before it trains on the rollout's step, such as for a budget that is spent."""


class UnusableError(RewardError):
    """Rewards that cannot be used. problems: (index of the reward, reason); the index is None if it is not known."""

    def __init__(self, problems: list[tuple[int | None, str]], sections: Sequence[AnyRewardSection]) -> None:
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
    # Messages of the prompt and of the completion if the prompt is a chat; empty if it is a text.
    prompt_messages: list[dict[str, Any]] = field(default_factory=list)
    completion_messages: list[dict[str, Any]] = field(default_factory=list)
    # End of the last turn's prompt and text of the last turn, for an episode. None for a rollout of one turn, which is
    # `prompt` and `completion`.
    last_prompt: str | None = None
    last_turn: str | None = None


@dataclass(frozen=True)
class Reward:
    """A reward: a function of the user or of rlctl, and the way to call it."""

    function: Callable[..., Any]
    # Calls the function for one rollout and returns the result. It returns an awaitable if the form is `coroutine`, and
    # takes a list of rollouts and returns an awaitable list if the form is `group`.
    call: Callable[[Any], Any]
    # True if the function may return None: it then does not judge the rollout.
    may_abstain: bool = False
    form: Form = "plain"
    # Returns counts by name, such as calls of a judge, since it was last called; None if the reward counts nothing.
    take_counts: Callable[[], dict[str, float]] | None = None
    # Takes the coroutine function that asks a model of the run; None if the reward asks none.
    connect: Callable[[AskModel], None] | None = None

    @classmethod
    def of_function(cls, function: Callable[..., Any]) -> "Reward":
        """Return a reward that is called with (prompt, completion, answer, row)."""
        return cls(function, lambda item: function(item.prompt, item.completion, item.answer, item.row))

    @classmethod
    def of_last_turn(cls, function: Callable[..., Any]) -> "Reward":
        """Return a reward that is called with the policy's last turn and the end of that turn's prompt."""

        def call(item: RewardInput) -> Any:
            prompt = item.prompt if item.last_prompt is None else item.last_prompt
            completion = item.completion if item.last_turn is None else item.last_turn
            return function(prompt, completion, item.answer, item.row)

        return cls(function, call)


@dataclass(frozen=True)
class RewardFailure:
    """Reason why a reward gave a rollout no value."""

    # Kind of failure, without text of the rollout, for example `raised ValueError`.
    kind: str
    # file:line of the user's code.
    where: str = ""
    # Further text, which may come from the rollout: one line of at most `MAX_DETAIL` characters.
    detail: str = ""
    # Traceback of at most `MAX_TRACE` characters.
    trace: str = ""
    # True if the run must stop before it trains on the rollout's step, such as for a budget that is spent.
    stops_run: bool = False

    @property
    def cause(self) -> str:
        """Kind and place. Failures with an equal cause are counted together."""
        return f"{self.kind} at {self.where}" if self.where else self.kind

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}" if self.detail else self.cause


@dataclass(frozen=True)
class ReasonedValue:
    """Value of one rollout, with the reason that a judge gave."""

    value: float
    reason: str


# Value of one rollout, or the failure. None means that the reward does not judge the rollout.
Outcome = float | ReasonedValue | RewardFailure | None


def attempt(reward: Reward, item: RewardInput) -> Outcome:
    """Call a reward for a rollout; return the finite number, None if it does not judge the rollout, or the failure."""
    try:
        return _to_outcome(reward, reward.call(item))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too
        return _to_failure(reward, error)


async def attempt_coroutine(reward: Reward, items: Sequence[RewardInput]) -> list[Outcome]:
    """Await a reward for one rollout, or for all rollouts of a task if its form is `group`. Return their outcomes."""
    try:
        if reward.form != "group":
            return [_to_outcome(reward, await reward.call(items[0]))]
        values = list(await reward.call(list(items)))
        if len(values) != len(items):
            detail = f"returned {len(values)} values for {len(items)} rollouts"
            failure = RewardFailure("not one value for each rollout", defined_at(reward.function), detail)
            return [failure] * len(items)
        return [_to_outcome(reward, value) for value in values]
    except BaseException as error:  # a cancellation too
        return [_to_failure(reward, error)] * len(items)


def _to_outcome(reward: Reward, value: object) -> Outcome:
    """Return the outcome of a reward that returned `value`. May run code of a user's type."""
    if isinstance(value, ReasonedValue | RewardFailure):
        return value
    number = finite_number(value)
    if number is not None or (value is None and reward.may_abstain):
        return number
    detail = shorten_text(f"returned {reprlib.repr(value)}") + several_numbers(value)
    return RewardFailure("no finite number", defined_at(reward.function), detail)


def _to_failure(reward: Reward, error: BaseException) -> RewardFailure:
    """Return the failure of a reward that raised `error`."""
    if isinstance(error, RewardError):
        return failure_of(error)
    where = raised_at(error, reward.function, __file__)
    return RewardFailure(f"raised {type(error).__name__}", where, error_text(error), trace_of(error))


def failure_of(error: RewardError) -> RewardFailure:
    """Return the failure that an error of rlctl's own describes. Its text is "kind: detail"."""
    kind, _, detail = str(error).partition(": ")
    return RewardFailure(kind, detail=shorten_text(detail), stops_run=isinstance(error, StopRunError))
