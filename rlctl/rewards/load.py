"""Loader of reward functions by their names in the config."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from rlctl.config.grpo_schema import RewardSection
from rlctl.config.plugins import REWARDS
from rlctl.rewards.base import NEEDS_EPISODE, RewardError, RewardFunction
from rlctl.utils.user_code import defined_at, import_error, load_module
from rlctl.workers.named_reward import NamedRewardError, is_named, named_arguments, named_value, takes_environments


def load_function(section: RewardSection) -> RewardFunction:
    """Return a built-in reward, or the function that `module:function` or `path.py:function` names.

    Raises RewardError if there is no such function or it does not take the four arguments.
    """
    if section.name not in REWARDS:
        return _user_function(section.name)
    module, _, name = REWARDS[section.name].partition(":")
    function: RewardFunction = getattr(importlib.import_module(module), name)(section)
    return function


def named_reward(function: Callable[..., Any]) -> RewardFunction:
    """Return a reward that calls a function by the names of its parameters: `prompts`, `completions`, columns.

    Chats are lists of messages, as in TRL. One that takes `environments` raises RewardError: it needs an episode.
    """

    def score(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
        if takes_environments(function):
            raise RewardError(f"{NEEDS_EPISODE}: set environment.name, or take (prompt, completion, answer, row)")
        said = row.get("prompt", row.get("messages"))
        is_chat = isinstance(said, list)
        answered = [{"role": "assistant", "content": completion}] if is_chat else completion
        given = {**row, "prompts": said if is_chat else prompt, "completions": answered}
        try:
            result = function(**named_arguments(function, given))
            if inspect.iscoroutine(result):
                # A third of the imports of a process of rewards.
                import asyncio

                result = asyncio.run(result)
            value = named_value(function, result)
        except NamedRewardError as error:
            raise RewardError(str(error)) from error
        if value is None:
            raise RewardError("returned None: it does not judge this rollout")
        return value

    return score


def _user_function(name: str) -> RewardFunction:
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
    if is_named(function):
        return named_reward(function)
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"is a coroutine at {defined_at(function)}: rewards are called, not awaited; write def")
    try:
        inspect.signature(function).bind("prompt", "completion", "answer", {})
    except TypeError as error:
        where = f" at {place}" if (place := defined_at(function)) else ""
        wanted = "it must take (prompt, completion, answer, row)"
        raise RewardError(f"wrong signature{where}: {wanted}; {error}") from error
    return function  # type: ignore[no-any-return]
