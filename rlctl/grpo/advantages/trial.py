"""Tries a user's advantage on made-up rewards before a run starts, to find errors that would end the first step."""

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
from rlctl.preflight.declared_columns import AGE, column_of
from rlctl.utils.user_code import looks_like_bug


class UnusableAdvantageError(AdvantageError, UserError):
    """A user's advantage cannot be used in any run. The message is one line."""


_WHAT = "grpo.advantage.name={}, tried on made-up rewards of 0 and 1"


def try_advantage(config: GrpoConfig) -> tuple[str, bool]:
    """Return a line for the user about the trial, and True if the trial failed.

    The line is empty for rlctl's advantages, which are not tried. It is also empty with an environment, whose rewards
    have no names before the first episode. Rewards of the run may differ from the made-up rewards, so most failures do
    not stop the run. Raises UnusableAdvantageError for a wrong number of advantages, and for a bug.
    """
    name = config.grpo.advantage.name
    if ":" not in name:
        return "", False
    try:
        # Hide numpy's warnings, because `token_advantages` reports a result that is not finite.
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
    """Return a group with rewards 0 and 1 and, unless the config filters such groups, one with only rewards 0.

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
    # Every age is 0, every log-prob -1.
    values = {name: 0.0 if name == AGE.name else -1.0 for name in columns}
    return ScoredRollouts(
        group=group,
        reward=np.array(sum(weights[name] * part for name, part in parts.items())),
        parts=parts,
        weights=weights,
        right=reward == 1,
        turns=turns,
        columns={
            name: [np.full((len(rollout_turns), *column_of(name).shape), value, np.float32) for rollout_turns in turns]
            for name, value in values.items()
        },
    )
