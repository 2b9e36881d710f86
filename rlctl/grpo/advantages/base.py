"""Base class of every advantage: scored rollouts as arrays, sums over groups, and advantages of sampled tokens.

Each estimator is a file of this folder; GRPO's is `group_mean.py`. A group is the rollouts of one task, even if another
task has an equal prompt. With rlctl's estimators the order of rollouts does not change a single bit of any advantage.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlctl.config.grpo_schema import AdvantageScope, UserAdvantageSection
from rlctl.config.plugin_options import checked_options
from rlctl.config.plugins import ADVANTAGES
from rlctl.config.schema import GrpoConfig
from rlctl.grpo.advantages.grouped_values import Floats as Floats
from rlctl.grpo.advantages.grouped_values import GroupedValues
from rlctl.rollout.types import Rollout
from rlctl.utils.user_code import defined_at, error_text, load_object, raised_at, shorten_text

Floats32 = NDArray[np.float32]
# Added to divisors, which may be nearly 0 for values that differ only by rounding. verl and NeMo-RL use the same value.
EPSILON = 1e-6


class AdvantageError(ValueError):
    """A user's advantage raised, or returned invalid values. The message is one line."""


class AdvantageShapeError(AdvantageError):
    """A user's advantage returned a number or shape of values that `Advantage.__call__` does not allow."""


@dataclass(frozen=True)
class ScoredRollouts:
    """n scored rollouts as arrays. Raises ValueError for a reward that is not finite or arrays of unequal length."""

    # int64 [n]: number of each rollout's group. Groups may have any numbers, in any order.
    group: NDArray[np.int64]
    # float64 [n]: weighted sum of the rewards, including penalties.
    reward: Floats
    # Name of a reward or penalty -> float64 [n], before weighting.
    parts: Mapping[str, Floats]
    # Name of a reward or penalty -> weight in the sum.
    weights: Mapping[str, float]
    # bool [n]: true if the rollout is correct (by `rewards.N.correct_at`).
    right: NDArray[np.bool_]
    # For each rollout, int64 [sampled tokens]: the index of each sampled token's turn, counted from 0 without gaps.
    turns: Rows[NDArray[np.int64]]
    # Name of a column in `Advantage.columns` -> for each rollout, float32 [sampled tokens, *shape].
    columns: Mapping[str, Rows[Floats32]] = field(default_factory=dict)
    # bool [n]: true for a rollout that ended at a limit of its length; empty: none did.
    is_cut: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))

    def __post_init__(self) -> None:
        if not len(self.is_cut):
            object.__setattr__(self, "is_cut", np.zeros(len(self.turns), np.bool_))
        columns = {"reward": self.reward, **{f"reward {name}": part for name, part in self.parts.items()}}
        shapes = {name: column.shape for name, column in columns.items()}
        if {self.group.shape, self.right.shape, *shapes.values()} != {(len(self.turns),)}:
            raise ValueError(f"groups {self.group.shape} and columns {shapes} must be of one length, one number each")
        for name, column in columns.items():
            bad_rows = np.flatnonzero(~np.isfinite(column))
            if len(bad_rows):
                row = int(bad_rows[0])
                raise ValueError(
                    f"{name} of rollout {row} (group {self.group[row]}) is {column[row]}, not a finite number"
                )

    @classmethod
    def read(cls, rollouts: Rows[Rollout], groups: Rows[int]) -> Self:
        """Return the arrays of some rollouts, which all have a reward. groups: number of each rollout's group."""
        scores = [rollout.score for rollout in rollouts if rollout.score is not None]
        names = dict.fromkeys(chain.from_iterable(score.parts for score in scores))
        weights: dict[str, float] = {}
        for score in scores:
            weights |= score.weights
        return cls(
            group=np.array(groups, np.int64),
            reward=np.array([score.value for score in scores], np.float64),
            parts={name: np.array([score.parts.get(name) or 0.0 for score in scores]) for name in names},
            weights={name: weights.get(name, 1.0) for name in names},
            right=np.array([score.right for score in scores], np.bool_),
            turns=[turn_of_tokens(rollout.sampled) for rollout in rollouts],
            is_cut=np.array([rollout.is_cut for rollout in rollouts], np.bool_),
        )

    @classmethod
    def join(cls, batches: "Rows[ScoredRollouts]") -> "ScoredRollouts":
        """Return the rollouts of all batches, without `columns`. All batches have the same rewards; no two batches have
        the same group number."""
        names = dict.fromkeys(chain.from_iterable(batch.parts for batch in batches))
        parts = {}
        weights: dict[str, float] = {}
        for name in names:
            parts[name] = np.concatenate([batch.parts.get(name, np.zeros(len(batch))) for batch in batches])
        for batch in batches:
            weights |= batch.weights
        return cls(
            group=np.concatenate([batch.group for batch in batches]),
            reward=np.concatenate([batch.reward for batch in batches]),
            parts=parts,
            weights=weights,
            right=np.concatenate([batch.right for batch in batches]),
            turns=list(chain.from_iterable(batch.turns for batch in batches)),
            is_cut=np.concatenate([batch.is_cut for batch in batches]),
        )

    def __len__(self) -> int:
        return len(self.group)

    @cached_property
    def num_sampled(self) -> NDArray[np.int64]:
        """Number of sampled tokens of each rollout, int64 [n]."""
        return np.array([len(turns) for turns in self.turns], np.int64)

    def select(self, rows: NDArray[Any]) -> "ScoredRollouts":
        """Return some of the rollouts. rows: indices of these rollouts, or bool [n]."""
        rows = np.arange(len(self))[rows]
        return ScoredRollouts(
            group=self.group[rows],
            reward=self.reward[rows],
            parts={name: part[rows] for name, part in self.parts.items()},
            weights=self.weights,
            right=self.right[rows],
            turns=[self.turns[row] for row in rows],
            columns={name: [column[row] for row in rows] for name, column in self.columns.items()},
            is_cut=self.is_cut[rows],
        )

    def groups(self) -> Iterator[NDArray[np.intp]]:
        """Yield for each group the indices of its rollouts, sorted by reward."""
        sorted_values = self.by_group(self.reward)
        yield from np.split(sorted_values.order, sorted_values.starts[1:]) if len(self) else ()

    def by_group(self, values: ArrayLike) -> "GroupedValues":
        """Return `values` [n], one for each rollout, sorted by group."""
        return GroupedValues.sort(np.asarray(values, np.float64), self.group)


@dataclass(frozen=True)
class Advantage(ABC):
    """Estimator of the advantages of rollouts, turns or tokens. Its fields are the keys of its config section."""

    # "group" if an advantage depends only on rollouts of the same group, "batch" if on all rollouts of the step.
    scope: ClassVar[AdvantageScope] = "group"
    # Names of `preflight.declared_columns.COLUMNS` that the estimator reads. A step computes these columns first.
    columns: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __call__(self, rollouts: ScoredRollouts) -> Floats | Rows[Floats]:
        """Return one advantage for each rollout, [n], or for each rollout one array: [turns] or [sampled tokens]."""

    def learned_columns(self, rollouts: ScoredRollouts) -> Mapping[str, Rows[Floats]]:
        """Return columns that a critic learns from: name -> for each rollout one number for each sampled token."""
        return {}

    @classmethod
    def from_config(cls, config: GrpoConfig) -> Self:
        """Return the estimator with the options in `grpo.advantage`."""
        section = config.grpo.advantage
        if isinstance(section, UserAdvantageSection):
            return cls(**checked_options(cls, Advantage, section.further, "grpo.advantage"))
        return cls(**{key.name: getattr(section, key.name) for key in fields(cls)})


def make_advantage(config: GrpoConfig) -> Advantage:
    """Return the estimator that `grpo.advantage.name` names, with its options."""
    name = config.grpo.advantage.name
    kind: type[Advantage] = load_object(ADVANTAGES.get(name, name))
    return kind.from_config(config)


def token_advantages(advantage: Advantage, rollouts: ScoredRollouts) -> list[NDArray[np.float32]]:
    """Return the advantages of all sampled tokens: for each rollout, float32 [sampled tokens].

    Raises AdvantageShapeError if the estimator returns a shape that `Advantage.__call__` does not allow, and
    AdvantageError if a value is not finite or a user's class raises.
    """
    name = type(advantage).__name__
    advantages = _call_advantage(advantage, rollouts)
    place = defined_at(type(advantage).__call__)
    where = f" at {place}" if place else ""
    if len(advantages) != len(rollouts):
        raise AdvantageShapeError(
            f"{name} returned {len(advantages)} advantages for {len(rollouts)} rollouts{where}; return one for each"
        )
    columns = []
    for row, (rollout_advantages, turns) in enumerate(zip(advantages, rollouts.turns)):
        values = np.asarray(rollout_advantages, np.float64)
        num_turns = int(turns.max(initial=-1)) + 1
        if values.shape == (num_turns,):
            values = values[turns]
        elif values.shape not in ((), turns.shape):
            raise AdvantageShapeError(
                f"{name} gave rollout {row} advantages of shape {values.shape}{where}: give a number, one for each of "
                f"its turns ({num_turns},), or one for each of its sampled tokens {turns.shape}"
            )
        with np.errstate(over="ignore"):
            column = np.broadcast_to(values, turns.shape).astype(np.float32)
        if not np.isfinite(column).all():
            raise AdvantageError(f"{name} gave rollout {row} an advantage that is not finite{where}: {values}")
        columns.append(column)
    return columns


def _call_advantage(advantage: Advantage, rollouts: ScoredRollouts) -> Floats | Rows[Floats]:
    """Call the estimator. Raises AdvantageError if a user's class raises or returns a value without a length."""
    kind = type(advantage)
    try:
        advantages = advantage(rollouts)
    except Exception as error:
        if kind.__module__.startswith("rlctl."):
            raise
        place = raised_at(error, kind.__call__, __file__)
        raise AdvantageError(
            f"{kind.__name__} raised {type(error).__name__} at {place}: {error_text(error)}"
        ) from error
    if not hasattr(advantages, "__len__"):
        raise AdvantageShapeError(
            f"{kind.__name__} returned {shorten_text(repr(advantages))} at {defined_at(kind.__call__)}; "
            f"return an advantage for each of {len(rollouts)} rollouts"
        )
    return advantages


def turn_of_tokens(sampled: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the index of each sampled token's turn, int64 [sampled tokens], from 0.

    sampled: bool [T], true at the sampled tokens of a trajectory. A turn is an unbroken run of sampled tokens.
    """
    begins = sampled & ~np.concatenate([[False], sampled[:-1]])
    return (np.cumsum(begins) - 1)[sampled]


def normalize(values: Floats, counts: ArrayLike = 1) -> Floats:
    """Return (a - m) / (s + 1e-6), [n], with m the mean and s the sample standard deviation of all values a.

    counts: how often each value counts, [n]. The variance is divided by sum(counts) - 1. If all values are equal, the
    result is exactly 0. Sums are exact, so that the order of the values does not change a bit.
    """
    weights = np.broadcast_to(np.asarray(counts, np.float64), values.shape)
    total = math.fsum(weights)
    if not total or values.min() == values.max():
        return np.zeros_like(values)
    centred = values - math.fsum(weights * values) / total
    variance = math.fsum(weights * centred**2) / max(total - 1, 1.0)
    return centred / (math.sqrt(variance) + EPSILON)
