"""Call of a reward function by the names of its parameters, as TRL's trainers call theirs.

TRL gives lists with a value for each rollout of a batch, and takes a list of numbers. rlctl scores one rollout at a
time, so that each list has one element.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlctl.utils.user_code import defined_at, finite_number, several_numbers, shortened

# Parameters that tell such a function from one of (prompt, completion, answer, row).
_NAMES = ("environments", "prompts", "completions")


class NamedRewardError(ValueError):
    """A reward function that cannot be called by the names of its parameters, or its value; one line."""


def is_named(function: Callable[..., Any]) -> bool:
    """Return True if a reward function has a parameter `environments`, `prompts` or `completions`."""
    try:
        return any(name in inspect.signature(function).parameters for name in _NAMES)
    except (TypeError, ValueError):
        return False


def takes_environments(function: Callable[..., Any]) -> bool:
    """Return True if a reward function gets the instances of environments."""
    return is_named(function) and "environments" in inspect.signature(function).parameters


def named_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the keyword arguments of a call, lists of one element. given: of one rollout, by name.

    Raises NamedRewardError for a parameter that nothing is given for.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        chosen = dict(given)
    else:
        chosen = {each.name: given[each.name] for each in parameters if each.name in given}
    keywords = [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    missing = [each.name for each in keywords if each.default is each.empty and each.name not in chosen]
    if missing:
        raise NamedRewardError(
            f"no value for its parameter {', '.join(missing)} at {defined_at(function)}: it gets {', '.join(given)}"
        )
    return {name: [value] for name, value in chosen.items()}


def named_value(function: Callable[..., Any], result: Any) -> float | None:
    """Return the value of one rollout; None where the function does not judge it, as in TRL.

    Raises NamedRewardError for another number of values than one, and for one that is no finite number.
    """
    listed = hasattr(result, "__len__") and not isinstance(result, str | bytes | dict)
    if listed and len(result) != 1:
        raise NamedRewardError(
            f"returned {len(result)} values for 1 rollout at {defined_at(function)}: rlctl scores one rollout at a "
            "time, in lists of one element; return a value for each"
        )
    value = result[0] if listed else result
    number = finite_number(value)
    if number is None and value is not None:
        told = shortened(repr(value)) + several_numbers(value)
        raise NamedRewardError(f"no finite number at {defined_at(function)}: {told}")
    return number
