"""The environments of a config, read and begun once on its first row, for commands before anything starts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlctl.cli.output import busy
from rlctl.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlctl.config.provenance import Origin
    from rlctl.config.schema import DatasetSection, GrpoConfig
    from rlctl.data.chat import Chat
    from rlctl.data.datasets import Row
    from rlctl.rollout.episode_setup import EpisodeSetup


def try_environments(
    config: "GrpoConfig", origins: "Mapping[str, Origin]", section: "DatasetSection", row: "Row", chat: "Chat"
) -> "EpisodeSetup":
    """Return the facts about the environments, each of which was imported in a process of its own.

    section, row: the first row of the data, on which one episode is begun. Raises ConfigError with every problem.
    """
    from rlctl.data.files import DataError
    from rlctl.data.load import load_prompts
    from rlctl.environments.pool import UnusableEnvironmentError
    from rlctl.rollout.episode_setup import environment_pool, set_up

    try:
        with busy("reading the environments"), environment_pool(config) as pool:
            return set_up(config, pool, chat, load_prompts(config, section, chat, [row])[0][0])
    except UnusableEnvironmentError as error:
        problems = [Problem(str(origins.get(key, "")), key, reason) for key, reason in error.problems]
        raise ConfigError(problems) from error
    except DataError as error:
        raise ConfigError([Problem("", "data", str(error))]) from error
