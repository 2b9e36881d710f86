"""What a reward is: a function of (prompt, completion, answer, row), and how a name in the config becomes one."""

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from rlctl.config.schema import RewardSection

RewardFunction = Callable[[str, str, str | None, dict[str, Any]], float]
Outcome = tuple[float | None, str | None]  # value, or why there is none: `KIND` or `KIND: detail`


class RewardError(ValueError):
    """A reward cannot be used; one line for the user."""


@dataclass(frozen=True)
class Item:
    """One rollout to score: texts of prompt and completion, the reference answer, the data set's row."""

    prompt: str
    completion: str
    answer: str | None
    row: dict[str, Any]


def load_function(section: RewardSection) -> RewardFunction:
    """exact, regex, math_verify, or `module:function` / `path.py:function` (from the working directory).

    Raises RewardError if there is no such function or it does not take the four arguments.
    """
    if section.name == "exact":
        from rlctl.rewards import exact

        return exact.score
    if section.name == "regex":
        from rlctl.rewards import regex

        return partial(regex.score, regex.compile_pattern(section.pattern))
    if section.name == "math_verify":
        from rlctl.rewards import math_verify

        return math_verify.score
    return _user_function(section.name)


def attempt(function: RewardFunction, item: Item) -> Outcome:
    """The finite number that `function` gives `item`, or what it did instead."""
    try:
        value: object = function(item.prompt, item.completion, item.answer, item.row)
        if isinstance(value, Real) and math.isfinite(value):
            return float(value), None
        return None, f"no finite number: returned {value!r}"
    except RewardError as error:
        return None, str(error)
    except Exception as error:
        return None, f"raised {type(error).__name__}: {error}"


def require_answer(answer: str | None) -> str:
    if answer is None:
        raise RewardError("no answer: the row has none to compare with")
    return answer


def _user_function(name: str) -> RewardFunction:
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        raise RewardError("no such reward: use exact, regex, math_verify, or a function of yours as module:function")
    try:
        module = _module(module_name)
    except Exception as error:  # whatever the user's module does at import
        raise RewardError(f"cannot import: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise RewardError(f"no such function: {module_name} has no {attribute!r}")
    try:
        inspect.signature(function).bind("prompt", "completion", "answer", {})
    except TypeError as error:
        raise RewardError(f"wrong signature: it must take (prompt, completion, answer, row); {error}") from error
    return function  # type: ignore[no-any-return]


def _module(name: str) -> ModuleType:
    path = Path(name)
    folder = path.parent if path.suffix == ".py" else Path()
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
    if path.suffix != ".py":
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
