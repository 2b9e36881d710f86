"""Contract of an environment: a class as TRL's `environment_factory` takes it, read without making an instance.

`reset(self, **row)` begins an episode, `get_reward(self)` values it. Every other public method is a tool. Beyond TRL's
contract, `step(self, message)` plays games without tools, and `close(self)` frees the resources of an episode. A `step`
that is documented as a tool is one.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from rlctl.config.errors import did_you_mean
from rlctl.config.plugins import ENVIRONMENT_COLUMN
from rlctl.environments.tool_schema import Schema, SchemaError, foreign_classes, tool_schema
from rlctl.telemetry.metrics import as_record, rows_problem
from rlctl.utils.user_code import MAX_LEVELS, defined_at, finite_number, is_too_deep, shortened

NO_REWARD = "has no get_reward"
# Characters of the name of a reward, which is part of a metric's name.
MAX_NAME = 100
# Methods that are no tools.
RESERVED = ("close", "get_reward", "reset", "step")

Message = dict[str, Any]
# Text, messages, or nothing to add to the prompt.
Observation = str | list[Message] | None
Reward = float | dict[str, float]


class ContractError(ValueError):
    """A value that breaks the contract; one line with the method and its result."""


@dataclass(frozen=True)
class EnvironmentContract:
    """Facts about an environment class, as plain data."""

    # Name of the class.
    name: str
    # Schemas of the tools, by name.
    tools: list[Schema]
    # True if the class has `step`, `get_reward`.
    has_step: bool
    has_reward: bool
    # One line for each reason why the class cannot be used.
    problems: list[str]
    # One line for each thing worth knowing.
    notes: list[str]
    # True for a rollout function, which has none of the above.
    is_function: bool = False
    # True for an agent, which has none of the above either.
    is_agent: bool = False
    # Names of reward functions that get the instance at the end of an episode.
    rewards: list[str] = field(default_factory=list)
    # Metrics that the class declares in `metrics`, as `telemetry.metrics.as_record` gives them.
    metrics: list[dict[str, Any]] = field(default_factory=list)


def read_contract(environment: object, arguments: Mapping[str, Any]) -> EnvironmentContract:
    """Return the contract of a class. arguments: those that an instance is made with."""
    if not inspect.isclass(environment):
        reason = f"must be a class, not a {type(environment).__name__}"
        return EnvironmentContract(str(getattr(environment, "__name__", environment)), [], False, False, [reason], [])
    members = _methods(environment)
    reserved = [name for name in RESERVED if not (name == "step" and is_tool(members.get(name)))]
    tools: list[Schema] = []
    problems, notes = _construction(environment, arguments), _class_notes(environment, members, reserved)
    for name, method in members.items():
        if name not in reserved:
            try:
                tools.append(tool_schema(method))
                for parameter, kind in foreign_classes(method).items():
                    notes.append(f"tool {name}: parameter {parameter}: JSON has no {kind}: a call gives a dict")
            except SchemaError as error:
                hint = _reserved_name(name, members)
                problems += [f"tool {name}: {each}{hint}" for each in error.args[: 1 if hint else None]]
    problems += _reserved({name: each for name, each in members.items() if name in reserved})
    return EnvironmentContract(
        environment.__name__,
        tools,
        "step" in members and "step" in reserved,
        "get_reward" in members,
        problems,
        notes,
        metrics=_metrics(environment),
    )


def is_tool(method: Callable[..., Any] | None) -> bool:
    """Return True if a method has all that a tool needs: a docstring, and a type and a line for each parameter."""
    try:
        return method is not None and bool(tool_schema(method))
    except SchemaError:
        return False


def reset_arguments(reset: Callable[..., Any], row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the keyword arguments of `reset`: the columns of the row, and the group's seed where it takes one.

    The column `environment` is left out, and `prompt` where `reset` has no such parameter: both belong to the trainer.
    A row's own `seed` comes before the group's. Raises ContractError for columns that `reset` does not take.
    """
    parameters = inspect.signature(reset).parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    seeds = {"seed": seed} if "seed" in parameters else {}
    columns = {name: value for name, value in row.items() if name != ENVIRONMENT_COLUMN or name in parameters}
    if not open_ended and "prompt" not in parameters:
        columns.pop("prompt", None)
    if wrong := _unmatched_columns(parameters, {**seeds, **columns}, open_ended):
        raise ContractError(f"its parameters ({defined_at(reset)}) are not the row's columns: {wrong}")
    return {**seeds, **columns}


def _unmatched_columns(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any], open_ended: bool) -> str:
    """Return the parameters of `reset` without a column, and the columns without a parameter; empty if there are
    none."""
    by_name = {
        name: each for name, each in parameters.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }
    needed = [name for name, each in by_name.items() if each.default is each.empty and name not in given]
    wrong = [f"no column {name}{did_you_mean(name, given)}" for name in needed]
    if not open_ended and (unknown := [name for name in given if name not in by_name]):
        wrong.append(f"no parameter for {', '.join(unknown)}: add **row")
    return "; ".join(wrong)


def opening(prompt: list[Message], observation: Observation) -> list[Message]:
    """Return the messages that an episode begins with.

    Text is appended to the content of the last message, without a separator, as TRL does it; without a prompt it is
    the user's message. Messages follow the prompt. Raises ContractError for a prompt whose content is no text.
    """
    if observation is None:
        return prompt
    if isinstance(observation, list):
        return [*prompt, *observation]
    if not prompt:
        return [{"role": "user", "content": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": _content(prompt[-1].get("content")) + observation}]


def checked_observation(value: object) -> Observation:
    """Return the result of `reset`: text, messages or None. Blocks of text are joined. Raises ContractError."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        if is_too_deep(value):
            raise ContractError(f"reset must return messages of at most {MAX_LEVELS} levels of lists and dicts")
        if all(isinstance(each.get("role"), str) for each in value):
            return [{**each, "content": _content(each.get("content"))} for each in value]
        return _content(value)
    raise ContractError(f"reset must return text, a list of messages or None, not {_value_text(value)}")


def checked_step(value: object) -> str | None:
    """Return the result of `step`: text, or None at the end of the episode. Raises ContractError."""
    if value is None or isinstance(value, str):
        return value
    raise ContractError(f"step must return text, or None at the end, not {_value_text(value)}")


def checked_reward(value: object, what: str = "get_reward") -> Reward:
    """Return the result of the method `what`: a finite number, or a dict of numbers. Raises ContractError."""
    if isinstance(value, dict):
        parts = {name: finite_number(part) for name, part in value.items()}
        if long := next((name for name in parts if isinstance(name, str) and not _is_short(name)), None):
            problem = f"names rewards of at most {MAX_NAME} printable characters, not {_value_text(long)}"
            raise ContractError(f"{what} must return a dict that {problem}")
        if parts and all(isinstance(name, str) for name in parts):
            numbers = {name: part for name, part in parts.items() if part is not None}
            if len(numbers) == len(parts) and math.isfinite(sum(numbers.values())):
                return numbers
    elif (number := finite_number(value)) is not None:
        return number
    raise ContractError(f"{what} must return a finite number or a dict of them, not {_value_text(value)}")


def _is_short(name: str) -> bool:
    return len(name) <= MAX_NAME and name.isprintable()


def tool_text(value: object) -> str:
    """Return a tool's result as the model reads it, by `str`; blocks of text are joined. Raises ContractError."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "type" in each for each in value):
        return _content(value)
    return str(value)


def _content(content: object) -> str:
    """Return a message's content as text. Raises ContractError for images and the like."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [each.get("text") for each in parts if isinstance(each, dict) and each.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(each, str) for each in texts):
        raise ContractError(f"content must be text or a list of {{type: text, text: ...}}, not {_value_text(content)}")
    return "".join(str(each) for each in texts)


def _methods(environment: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods by name, in alphabetical order, inherited ones too. A static method is none."""
    found: dict[str, Callable[..., Any]] = {}
    for name, member in inspect.getmembers_static(environment):
        function = member.__func__ if isinstance(member, classmethod) else member
        if isinstance(function, FunctionType) and not name.startswith("_"):
            found[name] = function
    return found


def _metrics(environment: type) -> list[dict[str, Any]]:
    """Return the rows of the class's `metrics`; none where that is something of the user's own."""
    rows = getattr(environment, "metrics", ())
    return [] if rows_problem(rows) else [as_record(row) for row in rows]


def _construction(environment: type, arguments: Mapping[str, Any]) -> list[str]:
    try:
        inspect.signature(environment).bind(**arguments)
    except TypeError as error:
        given = f"the arguments {', '.join(arguments)}" if arguments else "no arguments"
        return [f"cannot be made with {given}: {error}; they are environment.args"]
    except ValueError:  # a constructor that Python knows no signature of
        pass
    return []


def _reserved(members: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Return a line for each reserved method that is missing or cannot be called."""
    problems = [] if "reset" in members else ["has no method reset(self, **row): it begins each episode"]
    wanted = {"get_reward": (), "close": (), "step": ("message",)}
    for name, given in wanted.items():
        if name in members:
            try:
                inspect.signature(members[name]).bind(None, *given)
            except TypeError as error:
                tool = "; a tool needs a docstring, and a type and a line below `Args:` for each parameter"
                problems.append(
                    f"{name} is called as {name}({', '.join(('self', *given))}): {error}" + tool * (name == "step")
                )
    return problems


def _reserved_name(name: str, members: Mapping[str, Callable[..., Any]]) -> str:
    """Return a hint at a missing reserved method with a name near to a tool's."""
    return did_you_mean(name, [each for each in RESERVED if each not in members])


def _class_notes(environment: type, members: Mapping[str, Callable[..., Any]], reserved: Sequence[str]) -> list[str]:
    notes = []
    if "get_reward" not in members:
        what = "a reward function must value its episodes; its parameter `environments` gets the instance, as in TRL"
        notes.append(f"{NO_REWARD}: {what}")
    if "step" in members and "step" not in reserved:
        what = "documented as one, as in TRL; without `Args:` it would answer messages that call no tool"
        notes.append(f"step is a tool: it is {what}")
    if not set(members) - set(reserved) and "step" not in members:
        notes.append("has neither tools nor step: the model's first message ends the episode")
    for name in set(members) - set(RESERVED):
        if hint := _reserved_name(name, members):
            notes.append(f"{name} is a tool{hint}")
    for name, member in inspect.getmembers_static(environment):
        if isinstance(member, staticmethod) and not name.startswith("_"):
            notes.append(f"{name} is a static method, so it is no tool")
    return notes


def _value_text(value: object) -> str:
    try:
        return shortened(f"{type(value).__name__} {value!r}")
    except Exception:  # repr is code of the user's
        return type(value).__name__
