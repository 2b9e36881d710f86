"""Loader of reward functions by their names in the config."""

import importlib
import inspect
import traceback

from rlctl.config.grpo_schema import RewardSection
from rlctl.config.plugins import REWARDS
from rlctl.rewards.base import RewardError, RewardFunction, defined_at, error_text, place_of
from rlctl.utils import plugins
from rlctl.utils.plugins import load_module


def load_function(section: RewardSection) -> RewardFunction:
    """Return a built-in reward, or the function that `module:function` or `path.py:function` names.

    Raises RewardError if there is no such function or it does not take the four arguments.
    """
    if section.name not in REWARDS:
        return _user_function(section.name)
    module, _, name = REWARDS[section.name].partition(":")
    function: RewardFunction = getattr(importlib.import_module(module), name)(section)
    return function


def _user_function(name: str) -> RewardFunction:
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        raise RewardError("no such reward: use exact, regex, math_verify, or a function of yours as module:function")
    try:
        module = load_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module does at import
        # Frames of the user's own files.
        loaders = (__file__, plugins.__file__, importlib.__file__)
        frames = traceback.extract_tb(error.__traceback__)
        inside = [each for each in frames if not each.filename.startswith("<frozen") and each.filename not in loaders]
        where = f" at {place_of(inside[-1].filename, inside[-1].lineno or 0)}" if inside else ""
        raise RewardError(f"cannot import: {type(error).__name__}: {error_text(error)}{where}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise RewardError(f"no such function: {module_name} has no {attribute!r}")
    try:
        inspect.signature(function).bind("prompt", "completion", "answer", {})
    except TypeError as error:
        where = f" at {place}" if (place := defined_at(function)) else ""
        wanted = "it must take (prompt, completion, answer, row)"
        raise RewardError(f"wrong signature{where}: {wanted}; {error}") from error
    return function  # type: ignore[no-any-return]
