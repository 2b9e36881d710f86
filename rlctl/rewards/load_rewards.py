"""Loader of reward functions by their names in the config."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from rlctl.config.grpo_schema import AnyRewardSection, ModelRewardSection, ProgramRewardSection
from rlctl.config.plugins import REWARDS
from rlctl.rewards.base import NEEDS_EPISODE, Form, Reward, RewardError, RewardInput
from rlctl.rewards.judge.sections import JudgeSection
from rlctl.utils.user_code import defined_at, import_error, load_module
from rlctl.workers.named_reward import (
    NamedRewardError,
    is_named,
    is_verl,
    named_arguments,
    named_value,
    takes_environments,
    verl_arguments,
    verl_value,
)

# Rewards that look for a final answer. They read only the policy's last turn, because tools and users give no answer.
_LAST_TURN_REWARDS = ("math_verify", "reasoning_gym")


def load_reward(section: AnyRewardSection, records: Path | None = None) -> Reward:
    """Return a built-in reward, or the user's function named as `module:function` or `path.py:function`.

    records: file of a judge's requests; None: nothing outlives the process.
    Raises RewardError if there is no such function, or if it cannot be called as a reward.
    """
    if isinstance(section, ModelRewardSection | ProgramRewardSection):
        return Reward.of_function(_refuse_call)
    if section.name not in REWARDS:
        return _load_user_reward(section.name)
    module, _, name = REWARDS[section.name].partition(":")
    build = getattr(importlib.import_module(module), name)
    if isinstance(section, JudgeSection):
        judge: Reward = build(section, records)
        return judge
    function = build(section)
    if section.name in _LAST_TURN_REWARDS:
        return Reward.of_last_turn(function)
    return Reward.of_function(function)


def _refuse_call(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
    """Stand in for a reward model or tests of programs, which no process calls."""
    raise RewardError("is no function: no process calls it")


def _load_user_reward(name: str) -> Reward:
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        raise RewardError(f"no such reward: use {', '.join(REWARDS)}, or a function of yours as module:function")
    try:
        module = load_module(module_name)
    except BaseException as error:  # any error of the user's module at import
        raise RewardError(import_error(error, __file__)) from error
    function = getattr(module, attribute, None)
    if not hasattr(module, attribute):
        raise RewardError(f"no such function: {module_name} has no {attribute!r}")
    if not callable(function):
        raise RewardError(f"no function: {attribute} of {module_name} is a {type(function).__name__}")
    place = defined_at(function)
    where = f" at {place}" if place else ""
    is_async = inspect.iscoroutinefunction(function)
    if not is_async and inspect.iscoroutinefunction(vars(type(function)).get("__call__")):
        raise RewardError(f"is an object whose __call__ is async{where}: write def __call__, or an async def function")
    if _takes_group(function):
        if not is_async:
            raise RewardError(f"takes a group and is no coroutine{where}: write async def, with `group` alone")
        return Reward(function, function, may_abstain=True, form="group")
    form: Form = "coroutine" if is_async else "plain"
    if is_verl(function):
        return Reward(function, partial(_await_as_verl if is_async else _call_as_verl, function), form=form)
    if is_named(function):
        call_by_names = partial(_await_by_names if is_async else _call_by_names, function)
        return Reward(function, call_by_names, may_abstain=True, form=form)
    try:
        inspect.signature(function).bind("prompt", "completion", "answer", {})
    except TypeError as error:
        raise RewardError(f"wrong signature{where}: it must take (prompt, completion, answer, row); {error}") from error
    return replace(Reward.of_function(function), form=form)


def _takes_group(function: Callable[..., Any]) -> bool:
    """Return True if a parameter `group` is the only one that a function needs."""
    try:
        parameters = inspect.signature(function).parameters
        inspect.signature(function).bind(group=[])
    except (TypeError, ValueError):
        return False
    return "group" in parameters


def _call_by_names(function: Callable[..., Any], item: RewardInput) -> float | None:
    """Call a function as TRL does, with `prompts`, `completions` and columns as lists of one item; return its value.

    Raises RewardError if an argument is missing, if the result is no number, or if the function takes `environments`,
    which exist only in an episode.
    """
    result = _await_result(function(**_arguments_by_names(function, item)))
    with _as_reward_errors():
        return named_value(function, result)


async def _await_by_names(function: Callable[..., Any], item: RewardInput) -> float | None:
    """Await a coroutine function that `_call_by_names` would call. Raises the same errors."""
    result = await function(**_arguments_by_names(function, item))
    with _as_reward_errors():
        return named_value(function, result)


def _arguments_by_names(function: Callable[..., Any], item: RewardInput) -> dict[str, list[Any]]:
    """Return the keyword arguments that TRL passes. Raises RewardError."""
    if takes_environments(function):
        raise RewardError(f"{NEEDS_EPISODE}: set environment.name, or take (prompt, completion, answer, row)")
    # As in TRL, a function gets messages if the prompt is a chat, else texts.
    prompt: object = item.prompt_messages or item.prompt
    completion: object = item.completion_messages if item.prompt_messages else item.completion
    with _as_reward_errors():
        return named_arguments(function, {**item.row, "prompts": prompt, "completions": completion})


def _call_as_verl(function: Callable[..., Any], item: RewardInput) -> float:
    """Call a function as verl calls `compute_score`, and return its value. Raises RewardError."""
    with _as_reward_errors():
        arguments = verl_arguments(function, item.completion, item.answer, item.row)
    result = _await_result(function(**arguments))
    with _as_reward_errors():
        return verl_value(function, result)


async def _await_as_verl(function: Callable[..., Any], item: RewardInput) -> float:
    """Await a coroutine function that `_call_as_verl` would call. Raises RewardError."""
    with _as_reward_errors():
        arguments = verl_arguments(function, item.completion, item.answer, item.row)
    result = await function(**arguments)
    with _as_reward_errors():
        return verl_value(function, result)


@contextmanager
def _as_reward_errors() -> Iterator[None]:
    try:
        yield
    except NamedRewardError as error:
        raise RewardError(str(error)) from error


def _await_result(result: Any) -> Any:
    """Return a plain result unchanged. Run a coroutine that a plain function returned, and return its result."""
    return _runner().run(result) if inspect.iscoroutine(result) else result


@cache
def _runner() -> Any:
    """Return this process's event loop. All calls share it, because an async client of a function works on one loop."""
    # Imported only if needed: a third of the import time of a reward process.
    import asyncio

    return asyncio.Runner()
