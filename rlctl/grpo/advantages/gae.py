"""Advantage of PPO: generalised advantage estimation, from the values of a critic."""

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rlctl.config.grpo_schema import AdvantageScope
from rlctl.grpo.advantages.base import Advantage, Floats, Floats32, ScoredRollouts
from rlctl.preflight.declared_columns import REFERENCE_LOG_PROB, RETURN, ROLLOUT_LOG_PROB, VALUE

# Added to a variance, as in verl.
_EPSILON = 1e-8


@dataclass(frozen=True)
class Gae(Advantage):
    """A_t = d_t + gamma lam A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t (GAE, arXiv 1506.02438, equations 12 and 16).

    t counts the sampled tokens of a rollout, over all of its turns: V_{t+1} of a turn's last token is the value before
    the next turn's first one, so tokens of the environment cost no discount. V_t is the critic's value of the tokens
    before t. The reward of the rollout comes with its last token. After it the value is 0, or, with `bootstrap_cut`
    where the rollout was cut, that of all of its tokens.

    With `kl_coef` each token's reward is lowered by kl_coef times an estimate of KL(mu || ref), with mu the policy that
    sampled and x = log(ref / mu): k1 is -x, k2 is x^2 / 2, k3 is exp(x) - 1 - x (arXiv 2203.02155, equation 2). The
    returns that the critic learns are A_t + V_t. With `whiten` the advantages of the step's tokens then get mean 0 and
    variance 1, divided by n - 1.
    """

    scope: ClassVar[AdvantageScope] = "batch"

    gamma: float
    lam: float
    whiten: bool
    bootstrap_cut: bool
    kl_coef: float
    kl_estimator: Literal["k1", "k2", "k3"]

    @cached_property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """Columns that the estimator reads."""
        return (VALUE.name, ROLLOUT_LOG_PROB.name, REFERENCE_LOG_PROB.name) if self.kl_coef else (VALUE.name,)

    def __call__(self, rollouts: ScoredRollouts) -> Rows[Floats]:
        advantages = self.estimate(rollouts)
        if not self.whiten:
            return advantages
        all_advantages = np.concatenate(advantages) if advantages else np.zeros(0)
        if len(all_advantages) < 2:
            return advantages
        # Exact sums: the order of the rollouts changes no bit.
        count = len(all_advantages)
        mean = math.fsum(all_advantages) / count
        variance = math.fsum((all_advantages - mean) ** 2) / (count - 1)
        scale = 1 / math.sqrt(variance + _EPSILON)
        return [(rollout_advantages - mean) * scale for rollout_advantages in advantages]

    def learned_columns(self, rollouts: ScoredRollouts) -> dict[str, Rows[Floats]]:
        values = rollouts.columns[VALUE.name]
        advantages = self.estimate(rollouts)
        returns = [row + row_values[:, 0] for row, row_values in zip(advantages, values)]
        return {RETURN.name: returns}

    def estimate(self, rollouts: ScoredRollouts) -> list[Floats]:
        """Return the advantages before they are whitened, float64 [sampled tokens] of each rollout."""
        values = rollouts.columns[VALUE.name]
        lengths = rollouts.num_sampled
        longest = int(lengths.max(initial=0))
        # The last tokens of all rollouts are in the last column: rows are padded at their begin.
        padded_values = np.zeros((len(values), longest))
        padded_rewards = np.zeros((len(values), longest))
        next_values = np.zeros(len(values))
        for row, row_values in enumerate(values):
            if not len(row_values):
                continue
            padded_values[row, longest - len(row_values) :] = row_values[:, 0]
            padded_rewards[row, longest - len(row_values) :] = self._token_rewards(rollouts, row)
            padded_rewards[row, -1] += rollouts.reward[row]
            if self.bootstrap_cut and rollouts.is_cut[row]:
                next_values[row] = row_values[-1, 1]
        padded_advantages = np.zeros_like(padded_values)
        advantage = np.zeros(len(values))
        for index in reversed(range(longest)):
            delta = padded_rewards[:, index] + self.gamma * next_values - padded_values[:, index]
            advantage = delta + self.gamma * self.lam * advantage
            padded_advantages[:, index] = advantage
            next_values = padded_values[:, index]
        return [row[longest - length :] for row, length in zip(padded_advantages, lengths.tolist())]

    def _token_rewards(self, rollouts: ScoredRollouts, row: int) -> NDArray[np.float64] | float:
        """Return the rewards of a rollout's tokens without the rollout's own."""
        if not self.kl_coef:
            return 0.0
        columns = rollouts.columns
        log_ratio = _widen(columns[REFERENCE_LOG_PROB.name][row]) - _widen(columns[ROLLOUT_LOG_PROB.name][row])
        estimates = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": np.expm1(log_ratio) - log_ratio}
        return -self.kl_coef * estimates[self.kl_estimator]


def _widen(column: Floats32) -> Floats:
    return column.astype(np.float64)
