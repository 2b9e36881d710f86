"""Call of a reward function by the names of its parameters, as TRL's and verl's trainers call theirs.

TRL gives lists with a value for each rollout of a batch, and takes a list of numbers. rlctl scores one rollout at a
time, so that each list has one element. verl's `compute_score` is of one rollout.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rlctl.utils.user_code import defined_at, finite_number, several_numbers, shortened

# Parameters that tell such a function from one of (prompt, completion, answer, row).
_NAMES = ("environments", "prompts", "completions")
# Parameters of verl's `compute_score` alone, and the columns that it gets.
_VERL_MARKS = ("data_source", "solution_str")
_VERL_COLUMNS = ("data_source", "extra_info")


class NamedRewardError(ValueError):
    """A reward function that cannot be called by the names of its parameters, or its value; one line."""


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
    """Return True if a reward function gets the instances of environments."""
    return is_named(function) and "environments" in inspect.signature(function).parameters


def named_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the keyword arguments of a call, lists of one element. given: of one rollout, by name.

    Raises NamedRewardError for a parameter that nothing is given for.
    """
    return {name: [value] for name, value in _chosen_arguments(function, given).items()}


def verl_arguments(
    function: Callable[..., Any], completion: str, answer: str | None, row: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments of verl's `compute_score` for one rollout.

    `data_source` and `extra_info` are columns; `ground_truth` is the answer, else that of the column `reward_model`.
    Raises NamedRewardError for a parameter that nothing is given for.
    """
    given = {"extra_info": {}, **{name: row[name] for name in _VERL_COLUMNS if name in row}, "solution_str": completion}
    judged = row.get("reward_model")
    if answer is None and isinstance(judged, Mapping):
        answer = judged.get("ground_truth")
    if answer is not None:
        given["ground_truth"] = answer
    return _chosen_arguments(function, given, f"; {', '.join(_VERL_COLUMNS)} are columns of verl's rows")


def _chosen_arguments(function: Callable[..., Any], given: Mapping[str, Any], hint: str = "") -> dict[str, Any]:
    """Return those of the given arguments that `function` takes. Raises NamedRewardError for a missing one."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        chosen = dict(given)
    else:
        chosen = {each.name: given[each.name] for each in parameters if each.name in given}
    keywords = [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    missing = [each.name for each in keywords if each.default is each.empty and each.name not in chosen]
    if missing:
        place = defined_at(function)
        problem = f"no value for its parameter {', '.join(missing)} at {place}: it gets {', '.join(given)}{hint}"
        raise NamedRewardError(problem)
    return chosen


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


def verl_value(function: Callable[..., Any], result: Any) -> float:
    """Return the value of verl's `compute_score`: a number, or `score` of a dict. Raises NamedRewardError."""
    value = result["score"] if isinstance(result, Mapping) and "score" in result else result
    number = finite_number(value)
    if number is None:
        raise NamedRewardError(f"no finite number at {defined_at(function)}: {shortened(repr(result))}")
    return number
