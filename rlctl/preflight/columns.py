"""Roles and columns: the models of a run by name, and the arrays over tokens that a loss reads. No torch.

A loss names its columns. Each has one provider: the rollout itself, or a pass of the trainer under the weights of the
column's role, before the step's first update. A further model is a role, a further array a row of `COLUMNS`.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

# policy: the model that is trained. reference: its weights of version 0.
Role = Literal["policy", "reference"]


@dataclass(frozen=True)
class Column:
    """One array over the T tokens of a `TrainingSample`: [T, *shape] of `dtype`."""

    name: str
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    # Role that gives the tokens these log-probs. None: the rollout has the column.
    role: Role | None = None


ADVANTAGE, ROLLOUT_LOG_PROB, AGE = Column("advantage"), Column("rollout_log_prob"), Column("age")
PROXIMAL_LOG_PROB = Column("proximal_log_prob", role="policy")
REFERENCE_LOG_PROB = Column("reference_log_prob", role="reference")
# By name. A step computes columns in this order.
COLUMNS = {each.name: each for each in (ADVANTAGE, ROLLOUT_LOG_PROB, AGE, PROXIMAL_LOG_PROB, REFERENCE_LOG_PROB)}


def computed(names: Container[str]) -> dict[str, Role]:
    """Return name -> role of the named columns with a role, in the order of `COLUMNS`."""
    return {name: each.role for name, each in COLUMNS.items() if each.role and name in names}


def columns_problem(names: object) -> str | None:
    """Return the problem with the `columns` of a user's loss; None if there is none."""
    if not isinstance(names, tuple | list | set | frozenset):
        return f"`columns` is {names!r}: give a tuple of names, for example ({REFERENCE_LOG_PROB.name!r},)"
    unknown = [name for name in names if name not in COLUMNS]
    return f"`columns` names {unknown[0]!r}; there are {', '.join(COLUMNS)}" if unknown else None
