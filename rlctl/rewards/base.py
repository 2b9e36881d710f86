"""Interface of a reward: a function of (prompt, completion, answer, row), its input, its outcome, its errors."""

import inspect
import math
import reprlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from types import CodeType
from typing import Any

from rlctl.config.grpo_schema import RewardSection

RewardFunction = Callable[[str, str, str | None, dict[str, Any]], float]
MAX_DETAIL = 200
MAX_TRACE = 8000


class RewardError(ValueError):
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


Outcome = float | RewardFailure


def attempt(function: RewardFunction, item: RewardInput) -> Outcome:
    """Return the finite number that `function` gives `item`, or its failure."""
    try:
        value: object = function(item.prompt, item.completion, item.answer, item.row)
        number = _number(value)
    except RewardError as error:
        kind, _, detail = str(error).partition(": ")
        return RewardFailure(kind, detail=shortened(detail))
    except (Exception, SystemExit) as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        trace = "".join(traceback.format_exception(type(error), error, frames))
        if len(trace) > MAX_TRACE:
            trace = f"{trace[: MAX_TRACE // 2]}\n[...]\n{trace[-MAX_TRACE // 2 :]}"
        return RewardFailure(f"raised {type(error).__name__}", _raised_at(error, function), error_text(error), trace)
    if number is not None:
        return number
    return RewardFailure("no finite number", defined_at(function), shortened(f"returned {reprlib.repr(value)}"))


def _number(value: object) -> float | None:
    """Return `value` as a finite number; None where it is none. Runs the code of a value's own type."""
    if getattr(value, "shape", None) == ():  # a scalar of numpy's, a tensor without dimensions
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def error_text(error: BaseException) -> str:
    """Return the error's message as one short line."""
    try:
        return shortened(str(error))
    except Exception:  # an exception of the user's, whose text is the user's code
        return ""


def shortened(text: str) -> str:
    """Return the text as one line of at most `MAX_DETAIL` characters."""
    line = " ".join(text[: 4 * MAX_DETAIL].split())
    return line if len(line) <= MAX_DETAIL and len(text) <= 4 * MAX_DETAIL else f"{line[:MAX_DETAIL]}..."


def _raised_at(error: BaseException, function: RewardFunction) -> str:
    """Return file:line of the innermost frame in the function's own file, else of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    code = _code(function)
    own = [frame for frame in frames if code and frame.filename == code.co_filename]
    last = (own or [frame for frame in frames if frame.filename != __file__])[-1:]
    if last:
        return place_of(last[0].filename, last[0].lineno or 0)
    return defined_at(function)


def defined_at(function: RewardFunction) -> str:
    """Return file:line of the function's definition; empty where Python does not know it."""
    code = _code(function)
    return place_of(code.co_filename, code.co_firstlineno) if code else ""


def _code(function: RewardFunction) -> CodeType | None:
    plain = inspect.unwrap(function.func if isinstance(function, partial) else function)
    for each in (plain, vars(type(plain)).get("__call__")):
        if isinstance(code := getattr(each, "__code__", None), CodeType):
            return code
    return None


def place_of(file: str, line: int) -> str:
    """Return file:line, the file relative to the current directory where it is inside."""
    path = Path(file)
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"
