"""Contract of an environment: a class as TRL's `environment_factory` takes it, inspected without creating an instance.

`reset(self, **row)` begins an episode, and `get_reward(self)` returns its reward. Every other public method is a tool.
Beyond TRL's contract, `step(self, message)` plays games without tools, and `close(self)` frees the resources of an
episode. A `step` with a tool's docstring (a line below `Args:` for each parameter) is a tool.
`rollout/players/environment.py` plays the episodes.
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
from rlctl.utils.user_code import MAX_LEVELS, defined_at, finite_number, is_too_deep, shorten_text

NO_REWARD = "has no get_reward"
# Most characters of a reward's name. A metric's name contains it.
MAX_NAME = 100
# Public methods that are no tools.
RESERVED = ("close", "get_reward", "reset", "step")

Message = dict[str, Any]
# Result of `reset`: text or messages that are added to the prompt, or None.
Observation = str | list[Message] | None
# Result of `get_reward`: one number, or several numbers by name.
Reward = float | dict[str, float]


class ContractError(ValueError):
    """A value from user code that breaks the contract. The text is one line: the method and the value."""


@dataclass(frozen=True)
class EnvironmentContract:
    """Facts about an environment class, as plain data."""

    # Name of the class.
    name: str
    # Schemas of the tools, by name.
    tools: list[Schema]
    # True if the class has a `step` that is no tool.
    has_step: bool
    # True if the class has `get_reward`, or a reward function values its episodes.
    has_reward: bool
    # One line for each reason why the class cannot be used.
    problems: list[str]
    # Hints for the class's author, one line each. The class can be used all the same.
    notes: list[str]
    # True for a rollout function, which has no tools and no methods.
    is_function: bool = False
    # True for an agent, which has no tools and no methods either.
    is_agent: bool = False
    # Names of the reward functions that get the environment's instance at the end of an episode.
    rewards: list[str] = field(default_factory=list)
    # Metrics that the class declares in `metrics`, as records of `telemetry.metrics.as_record`.
    metrics: list[dict[str, Any]] = field(default_factory=list)


def read_contract(environment: object, arguments: Mapping[str, Any]) -> EnvironmentContract:
    """Return the contract of an environment's class. arguments: keyword arguments for its constructor."""
    if not inspect.isclass(environment):
        reason = f"must be a class, not a {type(environment).__name__}"
        name = str(getattr(environment, "__name__", environment))
        return EnvironmentContract(name=name, tools=[], has_step=False, has_reward=False, problems=[reason], notes=[])
    members = _methods(environment)
    reserved = [name for name in RESERVED if not (name == "step" and is_tool(members.get(name)))]
    tools: list[Schema] = []
    problems = _construction_problems(environment, arguments)
    notes = _class_notes(environment, members, reserved)
    for name, method in members.items():
        if name in reserved:
            continue
        try:
            tools.append(tool_schema(method))
        except SchemaError as error:
            hint = _reserved_name_hint(name, members)
            # A misspelt `reset` or `step` is probably not meant as a tool, so one problem and the hint are enough.
            tool_problems = error.args[:1] if hint else error.args
            problems += [f"tool {name}: {problem}{hint}" for problem in tool_problems]
            continue
        for parameter, kind in foreign_classes(method).items():
            notes.append(f"tool {name}: parameter {parameter}: JSON has no {kind}: a call gives a dict")
    problems += _reserved_problems({name: members[name] for name in reserved if name in members})
    return EnvironmentContract(
        name=environment.__name__,
        tools=tools,
        has_step="step" in members and "step" in reserved,
        has_reward="get_reward" in members,
        problems=problems,
        notes=notes,
        metrics=_metrics(environment),
    )


def is_tool(method: Callable[..., Any] | None) -> bool:
    """Return True if a method has a docstring, and a type hint and an `Args:` line for each parameter."""
    try:
        return method is not None and bool(tool_schema(method))
    except SchemaError:
        return False


def reset_arguments(reset: Callable[..., Any], row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the keyword arguments for `reset`: the row's columns, and the group's seed if it has a parameter `seed`.

    The columns `environment` and `prompt` belong to the trainer. `environment` is passed only to a parameter of this
    name, and `prompt` only to a parameter of this name or to `**row`. A row's column `seed` replaces the group's seed.
    Raises ContractError if a column has no parameter or a required parameter has no column.
    """
    parameters = inspect.signature(reset).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments: dict[str, Any] = {"seed": seed} if "seed" in parameters else {}
    arguments |= {name: value for name, value in row.items() if name != ENVIRONMENT_COLUMN or name in parameters}
    if not takes_any and "prompt" not in parameters:
        arguments.pop("prompt", None)
    if mismatch := _describe_unmatched(parameters, arguments, takes_any):
        raise ContractError(f"its parameters ({defined_at(reset)}) are not the row's columns: {mismatch}")
    return arguments


def _describe_unmatched(
    parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any], takes_any: bool
) -> str:
    """Name the parameters of `reset` without a column and the columns without a parameter; empty if all match."""
    problems = []
    unknown_names = dict.fromkeys(arguments)
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        unknown_names.pop(name, None)
        if parameter.default is parameter.empty and name not in arguments:
            problems.append(f"no column {name}{did_you_mean(name, arguments)}")
    if unknown_names and not takes_any:
        problems.append(f"no parameter for {', '.join(unknown_names)}: add **row")
    return "; ".join(problems)


def opening_messages(prompt: list[Message], observation: Observation) -> list[Message]:
    """Return the messages that an episode begins with: the row's prompt and the observation of `reset`.

    Text is appended to the content of the prompt's last message without a separator, as in TRL. If there is no prompt,
    the text becomes the user's message. Messages are added behind the prompt. Raises ContractError if the content of
    the prompt's last message is no text.
    """
    if observation is None:
        return prompt
    if isinstance(observation, list):
        return [*prompt, *observation]
    if not prompt:
        return [{"role": "user", "content": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": _content_text(prompt[-1].get("content")) + observation}]


def check_observation(value: object) -> Observation:
    """Return the checked result of `reset`: text, messages or None. Raises ContractError for another value.

    A list of text blocks, for example `[{"type": "text", "text": "Hi"}]`, becomes one text.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        if is_too_deep(value):
            raise ContractError(f"reset must return messages of at most {MAX_LEVELS} levels of lists and dicts")
        if all(isinstance(message.get("role"), str) for message in value):
            return [{**message, "content": _content_text(message.get("content"))} for message in value]
        return _content_text(value)
    raise ContractError(f"reset must return text, a list of messages or None, not {_value_text(value)}")


def check_step(value: object) -> str | None:
    """Return the checked result of `step`: text, or None at the end of the episode. Raises ContractError."""
    if value is None or isinstance(value, str):
        return value
    raise ContractError(f"step must return text, or None at the end, not {_value_text(value)}")


def check_reward(value: object, source: str = "get_reward") -> Reward:
    """Return a reward as a finite number, or as finite numbers by name. Raises ContractError for another value.

    source: method that returned the reward, for the error's text.
    """
    if isinstance(value, dict):
        parts = {name: finite_number(part) for name, part in value.items()}
        for name in parts:
            if isinstance(name, str) and not (len(name) <= MAX_NAME and name.isprintable()):
                problem = f"names rewards of at most {MAX_NAME} printable characters, not {_value_text(name)}"
                raise ContractError(f"{source} must return a dict that {problem}")
        if parts and all(isinstance(name, str) for name in parts):
            numbers = {name: part for name, part in parts.items() if part is not None}
            if len(numbers) == len(parts) and math.isfinite(sum(numbers.values())):
                return numbers
    elif (number := finite_number(value)) is not None:
        return number
    raise ContractError(f"{source} must return a finite number or a dict of them, not {_value_text(value)}")


def tool_text(value: object) -> str:
    """Return a tool's result as text for the model: joined text blocks, else `str(value)`. Raises ContractError."""
    if isinstance(value, list) and value and all(isinstance(block, dict) and "type" in block for block in value):
        return _content_text(value)
    return str(value)


def _content_text(content: object) -> str:
    """Return a message's content as text. Raises ContractError for a block that is no text, such as an image."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for block in content if isinstance(content, list) else [content]:
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if not isinstance(text, str):
            description = _value_text(content)
            raise ContractError(f"content must be text or a list of {{type: text, text: ...}}, not {description}")
        texts.append(text)
    return "".join(texts)


def _methods(environment: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods by name, in alphabetical order. Includes inherited methods, but no static methods."""
    methods: dict[str, Callable[..., Any]] = {}
    for name, member in inspect.getmembers_static(environment):
        function = member.__func__ if isinstance(member, classmethod) else member
        if isinstance(function, FunctionType) and not name.startswith("_"):
            methods[name] = function
    return methods


def _metrics(environment: type) -> list[dict[str, Any]]:
    """Return the metrics that the class declares; empty if its attribute `metrics` is no list of metrics.

    A user's class may use the name `metrics` for another purpose.
    """
    rows = getattr(environment, "metrics", ())
    return [] if rows_problem(rows) else [as_record(row) for row in rows]


def _construction_problems(environment: type, arguments: Mapping[str, Any]) -> list[str]:
    try:
        inspect.signature(environment).bind(**arguments)
    except TypeError as error:
        names = f"the arguments {', '.join(arguments)}" if arguments else "no arguments"
        return [f"cannot be made with {names}: {error}; they are environment.args"]
    except ValueError:  # Python finds no signature for a constructor in C
        pass
    return []


def _reserved_problems(members: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Return a line if `reset` is missing, and for each reserved method that cannot be called as rlctl calls it."""
    problems = [] if "reset" in members else ["has no method reset(self, **row): it begins each episode"]
    for name, arguments in (("get_reward", ["self"]), ("close", ["self"]), ("step", ["self", "message"])):
        if name not in members:
            continue
        try:
            inspect.signature(members[name]).bind(*arguments)
        except TypeError as error:
            problem = f"{name} is called as {name}({', '.join(arguments)}): {error}"
            if name == "step":
                problem += "; a tool needs a docstring, and a type and a line below `Args:` for each parameter"
            problems.append(problem)
    return problems


def _reserved_name_hint(name: str, members: Mapping[str, Callable[..., Any]]) -> str:
    """Return a hint if a tool's name is near to that of a missing reserved method, else an empty text."""
    return did_you_mean(name, [reserved for reserved in RESERVED if reserved not in members])


def _class_notes(environment: type, members: Mapping[str, Callable[..., Any]], hooks: Sequence[str]) -> list[str]:
    """Return notes on an environment. hooks: the names of `RESERVED`, without a `step` that is a tool."""
    notes = []
    if "get_reward" not in members:
        remedy = "a reward function must value its episodes; its parameter `environments` gets the instance, as in TRL"
        notes.append(f"{NO_REWARD}: {remedy}")
    if "step" in members and "step" not in hooks:
        documented = "it is documented as one, as in TRL"
        notes.append(f"step is a tool: {documented}; without `Args:` it would answer messages that call no tool")
    if not set(members) - set(hooks) and "step" not in members:
        notes.append("has neither tools nor step: the model's first message ends the episode")
    for name in set(members) - set(RESERVED):
        if hint := _reserved_name_hint(name, members):
            notes.append(f"{name} is a tool{hint}")
    for name, member in inspect.getmembers_static(environment):
        if isinstance(member, staticmethod) and not name.startswith("_"):
            notes.append(f"{name} is a static method, so it is no tool")
    return notes


def _value_text(value: object) -> str:
    try:
        return shorten_text(f"{type(value).__name__} {value!r}")
    except Exception:  # repr may run the user's code
        return type(value).__name__
