"""Trial of a user's advantage on made-up rewards before a run starts, to find errors that would end the first step."""

from collections.abc import Iterable

import numpy as np

from rlctl.config.errors import UserError
from rlctl.config.plugins import OVERLONG, reward_names
from rlctl.config.schema import GrpoConfig
from rlctl.grpo.advantages.base import (
    AdvantageError,
    AdvantageShapeError,
    ScoredRollouts,
    make_advantage,
    token_advantages,
)
from rlctl.preflight.declared_columns import AGE
from rlctl.utils.user_code import looks_like_bug


class UnusableAdvantageError(AdvantageError, UserError):
    """A user's advantage cannot be used in any run. The message is one line."""


_WHAT = "grpo.advantage.name={}, tried on made-up rewards of 0 and 1"


def try_advantage(config: GrpoConfig) -> tuple[str, bool]:
    """Return a line for the user on the trial, and True if it failed. The line is empty if nothing was tried: for
    rlctl's own advantages, and if rewards have no names yet, as an environment's before an episode.

    Rewards of the run may differ from the made-up ones, so most failures do not refuse the run. Raises
    UnusableAdvantageError for a wrong number of advantages, and for a bug.
    """
    name = config.grpo.advantage.name
    if ":" not in name:
        return "", False
    try:
        # A result that is not finite is told below.
        with np.errstate(all="ignore"):
            advantage = make_advantage(config)
            token_advantages(advantage, _made_up(config, advantage.columns))
    except Exception as error:  # any error of a user's class
        if isinstance(error, AdvantageShapeError) or looks_like_bug(str(error)):
            raise UnusableAdvantageError(f"{_WHAT.format(name)}: {error}") from error
        return ("", False) if config.has_turns else (f"{_WHAT.format(name)}: {error}", True)
    if config.has_turns:
        return "", False
    return f"{_WHAT.format(name)}: as many finite numbers as it must give", False


def _made_up(config: GrpoConfig, columns: Iterable[str]) -> ScoredRollouts:
    """Return a group with two different rewards, and a group with equal ones unless the config filters such groups.

    columns: names of the columns that the advantage reads.
    """
    size = config.grpo.num_generations_per_prompt
    groups = 1 if config.grpo.dynamic_sampling.filter else 2
    group = np.repeat(np.arange(groups), size)
    reward = np.where(group == 0, np.arange(len(group)) % 2, 0).astype(np.float64)
    weights = dict(zip(reward_names(config.rewards), (reward.weight for reward in config.rewards)))
    parts = {name: reward.copy() for name in weights}
    if config.grpo.overlong.penalty_tokens is not None:
        parts[OVERLONG] = np.zeros(len(group))
        weights[OVERLONG] = 1.0
    turns = [np.zeros(1 + row % 3, np.int64) for row in range(len(group))]
    # Ages of 0 and log-probs of -1.
    values = {name: 0.0 if name == AGE.name else -1.0 for name in columns}
    return ScoredRollouts(
        group=group,
        reward=np.array(sum(weights[name] * part for name, part in parts.items())),
        parts=parts,
        weights=weights,
        right=reward == 1,
        turns=turns,
        columns={
            name: [np.full(len(rollout_turns), value, np.float32) for rollout_turns in turns]
            for name, value in values.items()
        },
    )
