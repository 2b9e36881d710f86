"""Rewards and environments of a config tried on its first row, before anything starts."""

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


def try_rewards(composed: "Composed", *, fetch: bool) -> str:
    """Return one line on what the rewards gave, or why they were not tried. Raises ConfigError for unusable ones.

    fetch: a model or data of a hub may be fetched for it.
    """
    from rlctl.preflight.resolved import Resolved

    config = Resolved(composed.config).sampling
    if config is None:
        return "rewards: an SFT run has none without validation.recipe"
    from rlctl.data.datasets import shown
    from rlctl.data.files import DataError, files_of

    needed = [config.model.tokenizer or config.model.path, *files_of(config.data.train.paths)]
    if not fetch and (away := [name for name in needed if not Path(name).exists()]):
        return f"rewards: not tried, {away[0]} is not on this machine; rlctl config check --try-rewards fetches it"
    from rlctl.rewards.base import UnusableError

    try:
        score = _score_of_first_row(config)
    except ImportError as error:
        return f"rewards: not tried, {error.name or error} is not installed; see rlctl doctor"
    except DataError as error:
        raise ConfigError([Problem("", "", str(error))]) from error
    except UnusableError as error:
        # What is wrong with all of them stands at the first.
        found = [
            (f"rewards.{index or 0}.name", "rewards" if index is None else "", why) for index, why in error.problems
        ]
        raise ConfigError([_problem(composed, *each) for each in found]) from error
    parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items() if value is not None)
    judged = "right" if score.right else "not right"
    return f"rewards: tried on the first row of {shown(config.data.train.paths)}: {parts}; its own answer is {judged}"


def try_environments(composed: "Composed", section: "DatasetSection", row: "Row", chat: "Chat") -> "EpisodeSetup":
    """Return the facts about the environments, each of which was imported in a process of its own.

    section, row: the first row of the data, on which one episode is begun. Raises ConfigError with every problem.
    """
    from rlctl.data.files import DataError
    from rlctl.data.load import load_prompts
    from rlctl.environments.pool import UnusableEnvironmentError
    from rlctl.preflight.resolved import Resolved
    from rlctl.rollout.episode_setup import environment_pool, set_up

    config = Resolved(composed.config).sampling
    assert config is not None
    try:
        with busy("reading the environments"), environment_pool(config) as pool:
            return set_up(config, pool, chat, load_prompts(config, section, chat, [row])[0][0])
    except UnusableEnvironmentError as error:
        raise ConfigError([_problem(composed, key, "", reason) for key, reason in error.problems]) from error
    except DataError as error:
        raise ConfigError([Problem("", "data", str(error))]) from error


def _score_of_first_row(config: GrpoConfig) -> "Score":
    """Score the first row of data.train, answered with its own answer.

    Raises UnusableError for rewards that are no use, DataError for a row or a tokenizer that is none.
    """
    from rlctl.data.load import load_chat, load_prompts, read_rows
    from rlctl.rewards.scorer import Scorer
    from rlctl.rollout.scoring import sample_item

    # Of several sources the first.
    given = next(iter(config.data.train.sources.values()), config.data.train)
    section, first = replace(given, limit=1), replace(config, data=replace(config.data, max_prompt_length=None))
    rows = read_rows(first, section)
    prompts, _ = load_prompts(first, section, load_chat(first, config.model.path), rows)
    with Scorer(config.rewards) as scorer:
        return scorer.try_on_sample(sample_item(prompts[0]))


def _problem(composed: "Composed", key: str, shown: str, reason: str) -> Problem:
    """Return a problem at a key of the config that samples, which may be a recipe's. shown: the key to show, or none
    for that one."""
    within = "" if isinstance(composed.config, GrpoConfig) else f"{RECIPE}."
    return Problem(str(composed.origins.get(f"{within}{key}", "")), f"{within}{shown or key}", reason)
