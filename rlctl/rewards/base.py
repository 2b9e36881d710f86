"""Interface of a reward: a function of (prompt, completion, answer, row), its input, its outcome, its errors."""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlctl.config.errors import UserError
from rlctl.config.grpo_schema import RewardSection
from rlctl.utils.user_code import defined_at, error_text, finite_number, raised_at, several_numbers, shortened, trace_of

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


def attempt(function: RewardFunction, item: RewardInput) -> Outcome:
    """Return the finite number that `function` gives `item`, or its failure."""
    try:
        value: object = function(item.prompt, item.completion, item.answer, item.row)
        number = finite_number(value)
    except RewardError as error:
        kind, _, detail = str(error).partition(": ")
        return RewardFailure(kind, detail=shortened(detail))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too
        where = raised_at(error, function, __file__)
        return RewardFailure(f"raised {type(error).__name__}", where, error_text(error), trace_of(error))
    if number is not None:
        return number
    told = shortened(f"returned {reprlib.repr(value)}") + several_numbers(value)
    return RewardFailure("no finite number", defined_at(function), told)
