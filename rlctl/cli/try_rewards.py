"""The rewards of a config called on the first row, for commands that start nothing else."""

from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.config.errors import ConfigError, Problem
from rlctl.config.fields import RECIPE
from rlctl.config.schema import GrpoConfig

if TYPE_CHECKING:
    from rlctl.preflight.load import Composed


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
    from rlctl.grpo.trial import try_rewards
    from rlctl.rewards.base import UnusableError

    try:
        score = try_rewards(config)
    except ImportError as error:
        return f"rewards: not tried, {error.name or error} is not installed; see rlctl doctor"
    except DataError as error:
        raise ConfigError([Problem("", "", str(error))]) from error
    except UnusableError as error:
        problems = []
        for index, reason in error.problems:
            of = "" if config is composed.config else f"{RECIPE}."
            key = f"{of}rewards.{index or 0}.name"
            where = str(composed.origins.get(key, ""))
            problems.append(Problem(where, f"{of}rewards" if index is None else key, reason))
        raise ConfigError(problems) from error
    parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items() if value is not None)
    judged = "right" if score.right else "not right"
    return f"rewards: tried on the first row of {shown(config.data.train.paths)}: {parts}; its own answer is {judged}"
