"""A reward's interface: a function of (prompt, completion, answer, row), its input, its outcome."""

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

RewardFunction = Callable[[str, str, str | None, dict[str, Any]], float]
MAX_DETAIL = 200
MAX_TRACE = 8000


class RewardError(ValueError):
    """A reward cannot be used; one line for the user."""


@dataclass(frozen=True)
class RewardInput:
    """One rollout to score: texts of prompt and completion, the reference answer, the data set's row."""

    prompt: str
    completion: str
    answer: str | None
    row: dict[str, Any]


@dataclass(frozen=True)
class RewardFailure:
    """Reason why an item has no value.

    kind: what went wrong, free of the rollout's own text. where: file:line of the user's code. detail: what this
    rollout adds, a line of at most `MAX_DETAIL` characters. trace: the traceback, at most `MAX_TRACE` characters.
    """

    kind: str
    where: str = ""
    detail: str = ""
    trace: str = ""

    @property
    def cause(self) -> str:
        """The kind with its place: failures of one cause are counted together."""
        return f"{self.kind} at {self.where}" if self.where else self.kind

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}" if self.detail else self.cause


Outcome = float | RewardFailure


def attempt(function: RewardFunction, item: RewardInput) -> Outcome:
    """Return the finite number that `function` gives `item`, or what it did instead."""
    try:
        value: object = function(item.prompt, item.completion, item.answer, item.row)
        number = _number(value)
    except RewardError as error:
        kind, _, detail = str(error).partition(": ")
        return RewardFailure(kind, detail=shortened(detail))
    except (Exception, SystemExit) as error:
        return _raised(error, function)
    if number is not None:
        return number
    return RewardFailure("no finite number", defined_at(function), shortened(f"returned {reprlib.repr(value)}"))


def _number(value: object) -> float | None:
    """Return the finite number that `value` is; None where it is none. Runs the code of a value's own type."""
    if getattr(value, "shape", None) == ():  # a scalar of numpy's, a tensor without dimensions
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _raised(error: BaseException, function: RewardFunction) -> RewardFailure:
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    trace = "".join(traceback.format_exception(type(error), error, frames))
    if len(trace) > MAX_TRACE:
        trace = f"{trace[: MAX_TRACE // 2]}\n[...]\n{trace[-MAX_TRACE // 2 :]}"
    return RewardFailure(f"raised {type(error).__name__}", raised_at(error, function), error_text(error), trace)


def error_text(error: BaseException) -> str:
    """Return the error's message as one short line."""
    try:
        return shortened(str(error))
    except Exception:  # an exception of the user's, whose text is the user's code
        return ""


def shortened(text: str) -> str:
    """The text as one line of at most `MAX_DETAIL` characters."""
    line = " ".join(text[: 4 * MAX_DETAIL].split())
    return line if len(line) <= MAX_DETAIL and len(text) <= 4 * MAX_DETAIL else f"{line[:MAX_DETAIL]}..."


def raised_at(error: BaseException, function: RewardFunction | None = None) -> str:
    """file:line of the innermost frame in the function's own file, else of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    code = _code(function)
    own = [frame for frame in frames if code and frame.filename == code.co_filename]
    last = (own or [frame for frame in frames if frame.filename != __file__])[-1:]
    if last:
        return place_of(last[0].filename, last[0].lineno or 0)
    return defined_at(function) if function else ""


def defined_at(function: RewardFunction) -> str:
    """file:line of the function's definition; empty where Python does not know it."""
    code = _code(function)
    return place_of(code.co_filename, code.co_firstlineno) if code else ""


def _code(function: RewardFunction | None) -> CodeType | None:
    plain = inspect.unwrap(function.func if isinstance(function, partial) else function) if function else None
    for each in (plain, vars(type(plain)).get("__call__")):
        if isinstance(code := getattr(each, "__code__", None), CodeType):
            return code
    return None


def place_of(file: str, line: int) -> str:
    """Return file:line, the file relative to the current directory where it is inside."""
    path = Path(file)
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"
