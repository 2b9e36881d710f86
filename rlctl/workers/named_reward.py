"""Arguments and results of reward functions written for TRL or verl, which are called by their parameters' names.

TRL passes lists with one value for each rollout of a batch, and expects a list of numbers. rlctl scores one rollout at
a time, so each list has one element. verl's `compute_score` scores one rollout.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rlctl.utils.user_code import defined_at, finite_number, several_numbers, shorten_text

# Parameters by which a TRL function is recognized; rlctl's own functions take (prompt, completion, answer, row).
_NAMES = ("environments", "prompts", "completions")
# Parameters that only verl's `compute_score` has.
_VERL_MARKS = ("data_source", "solution_str")
# Columns of a row that `compute_score` gets as arguments.
_VERL_COLUMNS = ("data_source", "extra_info")


class NamedRewardError(ValueError):
    """A reward function has a parameter without a value, or its result is not a number. The message is one line."""


def is_named(function: Callable[..., Any]) -> bool:
    """Return True if a reward function has a parameter `environments`, `prompts` or `completions`."""
    return _takes_one_of(function, _NAMES)


def is_verl(function: Callable[..., Any]) -> bool:
    """Return True if a reward function has the parameters of verl's `compute_score`."""
    return _takes_one_of(function, _VERL_MARKS)


def _takes_one_of(function: Callable[..., Any], names: Collection[str]) -> bool:
    try:
        return any(name in inspect.signature(function).parameters for name in names)
    except (TypeError, ValueError):
        return False


def takes_environments(function: Callable[..., Any]) -> bool:
    """Return True if a reward function has the parameter `environments`, for the environments' instances."""
    return is_named(function) and "environments" in inspect.signature(function).parameters


def named_arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the keyword arguments of a call, as lists of one element. values: one rollout's values by name.

    Raises NamedRewardError for a parameter that has no value.
    """
    return {name: [value] for name, value in _choose_arguments(function, values).items()}


def verl_arguments(
    function: Callable[..., Any], completion: str, answer: str | None, row: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments of verl's `compute_score` for one rollout.

    `data_source` and `extra_info` are columns of the row. `ground_truth` is `answer`, or for None the entry
    `ground_truth` of the row's column `reward_model`. Raises NamedRewardError for a parameter that has no value.
    """
    columns = {name: row[name] for name in _VERL_COLUMNS if name in row}
    values = {"extra_info": {}, **columns, "solution_str": completion}
    reward_model = row.get("reward_model")
    if answer is None and isinstance(reward_model, Mapping):
        answer = reward_model.get("ground_truth")
    if answer is not None:
        values["ground_truth"] = answer
    return _choose_arguments(function, values, f"; {', '.join(_VERL_COLUMNS)} are columns of verl's rows")


def _choose_arguments(function: Callable[..., Any], values: Mapping[str, Any], hint: str = "") -> dict[str, Any]:
    """Return the values that `function` takes. Raises NamedRewardError for a parameter that has no value."""
    parameters = inspect.signature(function).parameters
    arguments = {name: values[name] for name in parameters if name in values}
    missing_names = []
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            # A function with **kwargs takes every value.
            arguments = dict(values)
            continue
        needs_value = parameter.kind is not parameter.VAR_POSITIONAL and parameter.default is parameter.empty
        if needs_value and name not in values:
            missing_names.append(name)
    if missing_names:
        place = defined_at(function)
        missing = ", ".join(missing_names)
        raise NamedRewardError(f"no value for its parameter {missing} at {place}: it gets {', '.join(values)}{hint}")
    return arguments


def named_value(function: Callable[..., Any], result: Any) -> float | None:
    """Return the reward of one rollout; None if the function returned None for the rollout, as TRL allows.

    Raises NamedRewardError for a list of more or fewer values than one, and for a value that is no finite number.
    """
    is_list = hasattr(result, "__len__") and not isinstance(result, str | bytes | dict)
    if is_list and len(result) != 1:
        raise NamedRewardError(
            f"returned {len(result)} values for 1 rollout at {defined_at(function)}: rlctl scores one rollout at a "
            "time, in lists of one element; return a value for each"
        )
    value = result[0] if is_list else result
    number = finite_number(value)
    if number is None and value is not None:
        description = shorten_text(repr(value)) + several_numbers(value)
        raise NamedRewardError(f"no finite number at {defined_at(function)}: {description}")
    return number


def verl_value(function: Callable[..., Any], result: Any) -> float:
    """Return the reward from a result of verl's `compute_score`: the number itself, or the key `score` of a dict.

    Raises NamedRewardError if that is not a finite number.
    """
    value = result["score"] if isinstance(result, Mapping) and "score" in result else result
    number = finite_number(value)
    if number is None:
        raise NamedRewardError(f"no finite number at {defined_at(function)}: {shorten_text(repr(result))}")
    return number
