"""Checks of a run's environments by the config and by the source files, which are parsed and not imported.

The environment's own process imports the classes later, see rollout/episode_setup.py.
"""

import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address

from rlctl.config.errors import BrokenValueError
from rlctl.config.plugins import AGENTS, NAMED_ENVIRONMENTS
from rlctl.config.schema import GrpoConfig
from rlctl.models.facts import ModelSizes
from rlctl.preflight.backend import Violation, Violations
from rlctl.preflight.check_inputs import missing_plugin

_MAX_LENGTH = "environment.max_length"


def check_environment(config: GrpoConfig, sizes: ModelSizes | None) -> Violations:
    """Find missing environments, and values that contradict rollouts of several turns."""
    section = config.environment
    if section.name is not None and section.choices:
        message = "names environments beside environment.name: leave one of the two empty"
        yield Violation("environment.choices", message, ("environment.name",))
    if section.args and section.name is None:
        yield Violation("environment.args", "need environment.name, which is null; each of choices has its args")
    yield from _check_rollout_function(config)
    yield from _check_agent(config)
    for key, name in _environment_names(config):
        with suppress(BrokenValueError):
            if message := missing_plugin(name, NAMED_ENVIRONMENTS, "Class"):
                yield Violation(key, message)
    if not config.has_turns:
        return
    yield from _check_turn_lengths(config, sizes)
    if section.timeout_s >= config.run.deadline_s:
        message = f"must be below run.deadline_s={config.run.deadline_s:g}, after which the run ends"
        yield Violation("environment.timeout_s", f"{message}, not {section.timeout_s:g}", ("run.deadline_s",))


def _check_rollout_function(config: GrpoConfig) -> Violations:
    name = config.rollout
    if name is None:
        return
    if config.environment.is_enabled:
        message = "plays rollouts, and so does environment: leave one of the two at null"
        yield Violation("rollout", message, ("environment.name",))
    if ":" not in name:
        yield Violation("rollout", f"must be module:function or file.py:function, not {name}")
    elif message := missing_plugin(name, (), "function"):
        yield Violation("rollout", message)


def _check_agent(config: GrpoConfig) -> Violations:
    agent = config.agent
    other_players = {"environment.name": config.environment.is_enabled, "rollout": config.rollout is not None}
    for key, is_set in other_players.items():
        if agent.is_enabled and is_set:
            yield Violation("agent", f"plays rollouts, and so does {key}: leave one of the two at null", (key,))
    if agent.name is not None and agent.command is not None:
        yield Violation("agent.command", "runs an agent, and so does agent.name: leave one at null", ("agent.name",))
    if agent.wrap is not None and agent.command is None:
        yield Violation("agent.wrap", "is put before agent.command, which is null", ("agent.command",))
    if agent.args and agent.name is None:
        yield Violation("agent.args", "are those of agent.name, which is null", ("agent.name",))
    if agent.name is not None and (message := missing_plugin(agent.name, AGENTS, "function")):
        yield Violation("agent.name", message)
    if agent.command is not None:
        yield from _check_command("agent.command", agent.command)
        if agent.wrap:
            yield from _check_command("agent.wrap", agent.wrap)
    try:
        ip_address(agent.bind)
    except ValueError:
        yield Violation("agent.bind", f"must be an address of this machine, as 127.0.0.1 or 0.0.0.0, not {agent.bind}")


def _check_command(key: str, text: str) -> Violations:
    """Find an empty command, or one whose program is not on this machine."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        yield Violation(key, f"is no command: {error}")
        return
    if not words:
        yield Violation(key, "is empty")
    elif shutil.which(words[0]) is None:
        yield Violation(key, f"there is no program {words[0]} on this machine's path")


def _environment_names(config: GrpoConfig) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, name) of every environment in the config."""
    section = config.environment
    if section.name is not None:
        yield "environment.name", section.name
    for key, choice in section.choices.items():
        with suppress(BrokenValueError):
            yield f"environment.choices.{key}.name", choice.name


def _check_turn_lengths(config: GrpoConfig, sizes: ModelSizes | None) -> Violations:
    """Find token limits that contradict those of a conversation of several turns."""
    longest = config.environment.max_length
    turn_tokens = config.generation.max_new_tokens
    limits = (config.model.max_length, sizes.max_positions if sizes else None)
    lowest_limit = min((limit for limit in limits if limit is not None), default=None)
    if longest is not None and lowest_limit is not None and longest > lowest_limit:
        message = f"must be at most the longest sequence, {lowest_limit}, not {longest}"
        yield Violation(_MAX_LENGTH, message, ("model.max_length",))
    if longest is not None and turn_tokens >= longest:
        message = f"bounds one turn and must be below {_MAX_LENGTH}={longest}, not {turn_tokens}"
        yield Violation("generation.max_new_tokens", message, (_MAX_LENGTH,))
    if config.data.max_prompt_length is not None and config.opens_prompts:
        message = f"a prompt is known when its episode begins: leave it null; {_MAX_LENGTH} bounds the conversation"
        yield Violation("data.max_prompt_length", message, ("environment.name",))
    if config.grpo.overlong.penalty_tokens is not None:
        message = "is for rollouts of one turn: leave it null, or value lengths in get_reward or in a reward"
        yield Violation("grpo.overlong.penalty_tokens", message, ("environment.name",))
