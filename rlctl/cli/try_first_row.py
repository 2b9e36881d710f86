"""Rewards and environments of a config tried on its first row, before anything starts.

They run the user's code, in processes of its own: in a run, in a dry run, and where an option asks for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.cli.output import busy
from rlctl.config.errors import ConfigError, Problem
from rlctl.config.fields import RECIPE
from rlctl.config.schema import GrpoConfig

if TYPE_CHECKING:
    from rlctl.config.schema import DatasetSection
    from rlctl.data.chat import Chat
    from rlctl.data.datasets import Row
    from rlctl.preflight.load import Composed
    from rlctl.rewards.scorer import Score
    from rlctl.rollout.episode_setup import EpisodeSetup


def runs_others_code(config: GrpoConfig | None) -> bool:
    """Return True if a reward is a function of the user's. config: see `Resolved.sampling`."""
    return config is not None and any(":" in reward.name for reward in config.rewards)


def try_all(composed: "Composed", *, rewards: bool, environments: bool, fetch: bool) -> list[str]:
    """Return a line or more on what rewards and environments gave, or why they were not tried.

    fetch: a model or data of a hub may be fetched for it. Raises ConfigError with every problem of both.
    """
    lines, problems = list[str](), list[Problem]()
    for wanted, tried in ((rewards, _try_rewards), (environments, _try_environments)):
        try:
            lines += tried(composed, fetch) if wanted else []
        except ConfigError as error:
            problems += error.problems
    if problems:
        # A wrong row or tokenizer is wrong for both.
        raise ConfigError(dict.fromkeys(problems))
    return lines


def _try_rewards(composed: "Composed", fetch: bool) -> list[str]:
    from rlctl.preflight.resolved import Resolved

    config = Resolved(composed.config).sampling
    if config is None:
        return ["rewards: an SFT run has none without validation.recipe"]
    from rlctl.data.datasets import shown
    from rlctl.data.files import DataError

    if away := _away(config, fetch):
        return [f"rewards: not tried, {away} is not on this machine; rlctl config check --try-rewards fetches it"]
    from rlctl.grpo.advantages.trial import UnusableAdvantageError, try_advantage
    from rlctl.rewards.base import UnusableError

    try:
        score = _score_of_first_row(config)
    except ImportError as error:
        return [f"rewards: not tried, {error.name or error} is not installed; see rlctl doctor"]
    except DataError as error:
        raise ConfigError([Problem("", "data", str(error))]) from error
    except UnusableError as error:
        # A problem of all is told at the first.
        found = [
            (f"rewards.{index or 0}.name", "rewards" if index is None else "", why) for index, why in error.problems
        ]
        raise ConfigError([_problem(composed, *each) for each in found]) from error
    parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items() if value is not None)
    if score.value is None:
        return ["rewards: called with the environment at the end of each episode, so not tried here"]
    judged = "right" if score.right else "not right"
    tried = f"rewards: tried on the first row of {shown(config.data.train.paths)}: {parts}; its own answer is {judged}"
    try:
        advantage, _ = try_advantage(config) if isinstance(composed.config, GrpoConfig) else ("", False)
    except UnusableAdvantageError as error:
        raise ConfigError([_problem(composed, "grpo.advantage.name", "", str(error).partition("=")[2])]) from error
    return [tried, *[advantage] * bool(advantage)]


def _try_environments(composed: "Composed", fetch: bool) -> list[str]:
    from rlctl.preflight.resolved import Resolved

    config = Resolved(composed.config).sampling
    if config is None or not config.has_turns:
        return ["environment: rollouts have one turn, without one"]
    from rlctl.data.datasets import shown
    from rlctl.data.load import load_chat
    from rlctl.rollout.episode_setup import environment_pool, read_environments

    why = ""
    if away := _away(config, fetch):
        why = f"{away} is not on this machine; rlctl config check --try-environments fetches it"
    else:
        try:
            with _as_config_errors(composed):
                section, row = _first_row(config)
                chat = load_chat(config, config.model.path)
            setup = try_environments(composed, section, row, chat)
        except ImportError as error:
            why = f"{error.name or error} is not installed; see rlctl doctor"
        else:
            begun = f"begun on the first row of {shown(config.data.train.paths)}"
            return [*setup.notes, *[f"environment: read, and {begun}"] * (config.rollout is None)]
    with _as_config_errors(composed), busy("reading the environments"), environment_pool(config) as pool:
        read_environments(config, pool)
    return [f"environment: read, but not begun on a row: {why}"]


def _away(config: GrpoConfig, fetch: bool) -> str:
    """Return the tokenizer or the data that are not on this machine and may not be fetched; empty if there is none."""
    from rlctl.data.files import files_of

    needed = [config.model.tokenizer or config.model.path, *files_of(config.data.train.paths)]
    return "" if fetch else next((name for name in needed if not Path(name).exists()), "")


def try_environments(composed: "Composed", section: "DatasetSection", row: "Row", chat: "Chat") -> "EpisodeSetup":
    """Return the facts about the environments, each of which was imported in a process of its own.

    section, row: the first row of the data, on which one episode is begun. Raises ConfigError with every problem.
    """
    from rlctl.data.load import load_prompts
    from rlctl.preflight.resolved import Resolved
    from rlctl.rollout.episode_setup import environment_pool, set_up

    config = Resolved(composed.config).sampling
    assert config is not None
    with _as_config_errors(composed), busy("reading the environments"), environment_pool(config) as pool:
        return set_up(config, pool, chat, load_prompts(config, section, chat, [row])[0][0])


@contextmanager
def _as_config_errors(composed: "Composed") -> Iterator[None]:
    """Raise ConfigError for unusable environments and data."""
    from rlctl.data.files import DataError
    from rlctl.environments.pool import UnusableEnvironmentError

    try:
        yield
    except UnusableEnvironmentError as error:
        raise ConfigError([_problem(composed, key, "", reason) for key, reason in error.problems]) from error
    except DataError as error:
        raise ConfigError([Problem("", "data", str(error))]) from error


def _score_of_first_row(config: GrpoConfig) -> "Score":
    """Score the first row of data.train, answered with its own answer.

    Raises UnusableError for unusable rewards, DataError for a bad row or tokenizer.
    """
    from rlctl.data.load import load_chat, load_prompts
    from rlctl.rewards.scorer import Scorer
    from rlctl.rollout.scoring import sample_item

    section, row = _first_row(config)
    whole = replace(config, data=replace(config.data, max_prompt_length=None))
    prompts, _ = load_prompts(whole, section, load_chat(config, config.model.path), [row])
    with Scorer(config.rewards, episodes=config.environment.enabled) as scorer:
        return scorer.try_on_sample(sample_item(prompts[0]))


def _first_row(config: GrpoConfig) -> "tuple[DatasetSection, Row]":
    """Return the first row of data.train, of several sources of the first one. Raises DataError."""
    from rlctl.data.load import read_rows

    given = next(iter(config.data.train.sources.values()), config.data.train)
    section = replace(given, limit=1)
    return section, read_rows(config, section)[0]


def _problem(composed: "Composed", key: str, shown: str, reason: str) -> Problem:
    """Return a problem at a key of the config that samples, which may be a recipe's. shown: the key to show, or none
    for that one."""
    within = "" if isinstance(composed.config, GrpoConfig) else f"{RECIPE}."
    return Problem(str(composed.origins.get(f"{within}{key}", "")), f"{within}{shown or key}", reason)
