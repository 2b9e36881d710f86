"""Columns and other declarations of a run's loss and advantage, which checks read without torch.

A loss and an advantage name the columns that they read. A column without a role comes with the rollout. A column with a
role is computed by a forward pass of the trainer with that role's weights, before the step's advantages and its first
update. A new model is a new role, and a new array is a new row of `COLUMNS`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from rlctl.config.errors import did_you_mean
from rlctl.config.grpo_schema import AdvantageSection, LossSection, UserClassSection
from rlctl.config.schema import GrpoConfig, RunConfig, SftConfig
from rlctl.telemetry.metrics import Metric, rows_problem
from rlctl.utils.user_code import load_object

# Name of a model of the run: policy, the model that is trained; reference; teacher, or teachers.NAME of several; and
# roles.NAME of a further one. A role other than the policy has the name of its section in the config.
Role = str
# swapped: the weights replace the policy's for a pass. resident: a further module in the trainer's ranks. engines: a
# pool of engines scores.
RolePlace = Literal["swapped", "resident", "engines"]


@dataclass(frozen=True)
class RoleModel:
    """The model of a role that is not trained, for example the reference.

    swapped: a rank keeps its shard of these weights on the host. For a forward pass it swaps them with the policy's on
    the device. resident: the rank has a further module for its shard.
    """

    # Hugging Face folder. If swapped, the model has the policy's architecture, or it is a PEFT folder of adapters with
    # the shapes of the trained ones.
    folder: str
    place: RolePlace = "swapped"


@dataclass(frozen=True)
class HeldRole:
    """Memory of a role besides the policy, for example the reference."""

    name: Role
    # Bytes of one rank's shard of its weights, in the compute dtype.
    rank_bytes: int
    # True if they are on the device while its log-probs are computed, besides the policy's.
    is_resident: bool
    # Phase of its passes: train for a divergence that an update computes.
    phase: Literal["log_probs", "train"] = "log_probs"


@dataclass(frozen=True)
class Column:
    """One array over the T tokens of a `TrainingSample`: [T, *shape] of `dtype`."""

    name: str
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    # Role whose weights compute the column. None: the rollout has the column. If there are several teachers, the role
    # is `teacher`, and a row's own teacher computes its column.
    role: Role | None = None


# Section of a role -> phase in which a step computes its columns. Any other section gives its name to the phase.
_PHASES_OF_SECTIONS = {"policy": "log_probs", "reference": "log_probs", "teachers": "teacher"}


def phase_of(role: Role) -> str:
    """Return the phase of a step in which columns of `role` are computed."""
    section = role.partition(".")[0]
    return _PHASES_OF_SECTIONS.get(section, section)


ADVANTAGE = Column("advantage")
ROLLOUT_LOG_PROB = Column("rollout_log_prob")
AGE = Column("age")
PROXIMAL_LOG_PROB = Column("proximal_log_prob", role="policy")
REFERENCE_LOG_PROB = Column("reference_log_prob", role="reference")
TEACHER_LOG_PROB = Column("teacher_log_prob", role="teacher")
# Id and log-prob of each of the teacher's likeliest tokens, from its engines. An id below 2^24 is exact in float32.
# -1: as many tokens as `distillation.num_top_tokens`.
TEACHER_TOP = Column("teacher_top", shape=(-1, 2), role="teacher")
# Role of the run's second trained model, see `config.critic_schema`.
CRITIC: Role = "critic"
# At each token the critic's value of the tokens before it, and of the tokens up to and including it.
VALUE = Column("value", shape=(2,), role=CRITIC)
# The critic's target at each token. The advantage computes it.
RETURN = Column("return")
_ALL_COLUMNS = (
    *(ADVANTAGE, ROLLOUT_LOG_PROB, AGE, PROXIMAL_LOG_PROB, REFERENCE_LOG_PROB, TEACHER_LOG_PROB, TEACHER_TOP),
    *(VALUE, RETURN),
)
# Column by name. A step computes columns in this order.
COLUMNS = {column.name: column for column in _ALL_COLUMNS}


# End of the name of the column of `roles.NAME`, which is NAME_log_prob.
_LOG_PROB = "_log_prob"
FURTHER_ROLES = "roles"
# Phases of a step in which the trainer's ranks compute columns.
COLUMN_PHASES = (*dict.fromkeys(phase_of(column.role) for column in _ALL_COLUMNS if column.role), FURTHER_ROLES)


def column_of(name: str) -> Column:
    """Return the column of this name: one of `COLUMNS`, or that of a further role. Raises KeyError."""
    if name in COLUMNS or not name.endswith(_LOG_PROB):
        return COLUMNS[name]
    return Column(name, role=f"{FURTHER_ROLES}.{name.removesuffix(_LOG_PROB)}")


def name_further_column(role: str) -> str:
    """Return the name of the column that the further role of this name in `roles` computes."""
    return role + _LOG_PROB


def roles_by_column(names: Collection[str]) -> dict[str, Role]:
    """Return column name -> role of the columns in `names` that have a role, in the order of `COLUMNS`.

    Columns of further roles come last, by name.
    """
    ordered_names = [name for name in COLUMNS if name in names]
    ordered_names += sorted(name for name in names if name not in COLUMNS)
    columns = [column_of(name) for name in ordered_names]
    return {column.name: column.role for column in columns if column.role}


def columns_problem(
    names: object, missing: Mapping[str, str] = MappingProxyType({}), roles: Collection[str] | None = None
) -> str | None:
    """Return the problem with the `columns` of a user's class; None if there is none.

    missing: name -> reason, of columns that this run does not have. roles: names of the run's further roles; None: not
    known.
    """
    if not isinstance(names, tuple | list | set | frozenset):
        return f"`columns` is {names!r}: give a tuple of names, for example ({REFERENCE_LOG_PROB.name!r},)"
    for name in names:
        if name in missing:
            return f"`columns` names {name!r}: {missing[name]}"
        if name in COLUMNS:
            continue
        readable = [column for column in COLUMNS if column not in missing]
        hint = did_you_mean(str(name), [*readable, *map(name_further_column, roles or ())])
        role = str(name).removesuffix(_LOG_PROB)
        if role == name:
            return f"`columns` names {name!r}{hint}; there are {', '.join(readable)}"
        if roles is not None and role not in roles:
            section = f"{FURTHER_ROLES}.{role}"
            return f"`columns` names {name!r}{hint}: the run has no {section}; set {section}.path"
    return None


def read_declaration(section: LossSection | AdvantageSection, name: str) -> Any:
    """Return a declaration of a loss or advantage, for example `columns`: the section's attribute, or that of the
    user's class.

    None where the class has none or cannot be imported; a check reports that. A loss of rlctl is not imported, because
    it imports torch: its section declares the same as its class.
    """
    owner = user_class(section.name) if isinstance(section, UserClassSection) else section
    return getattr(owner, name, None)


def named_columns(section: LossSection | AdvantageSection) -> tuple[str, ...]:
    """Return the columns that a loss or advantage names. Wrong names give an empty tuple; a check reports them."""
    names = read_declaration(section, "columns") or ()
    return () if columns_problem(names) else tuple(names)


def read_columns(config: RunConfig) -> set[str]:
    """Return the names of the columns that the loss, its terms and the advantage read. An SFT run has no columns."""
    if isinstance(config, SftConfig):
        return set()
    loss = config.grpo.loss
    columns = {*named_columns(loss), *named_columns(config.grpo.advantage)}
    if loss.kl_coef > 0:
        columns.add(REFERENCE_LOG_PROB.name)
    if loss.distillation and loss.distillation.over == "sampled":
        columns.add(TEACHER_LOG_PROB.name)
    if gives_top(config):
        columns.add(TEACHER_TOP.name)
    return columns


def is_teacher(role: Role) -> bool:
    """Return True for `teacher`, and for each of `teachers`."""
    return role.partition(".")[0] in ("teacher", "teachers")


def gives_top(config: RunConfig) -> bool:
    """Return True if engines of teachers give the likeliest tokens from which the loss's divergence is computed."""
    teachers = [config.teacher, *config.teachers.values()]
    on_engines = any(teacher is not None and teacher.place == "engines" for teacher in teachers)
    return on_engines and config.distillation is not None and config.distillation.over == "top_k"


def missing_columns(config: GrpoConfig) -> dict[str, str]:
    """Return name -> reason, of columns that no loss or advantage of this run can read."""
    missing = {TEACHER_TOP.name: "grpo.loss.distillation alone reads it"}
    if not config.async_.enabled:
        reason = "a synchronous run has none, for no token is older than the weights; set async.enabled=true"
        missing[AGE.name] = reason
    if gives_top(config):
        missing[TEACHER_LOG_PROB.name] = "the teacher's engines give its likeliest tokens alone (over=top_k)"
    if config.teacher is None and not config.teachers:
        missing[TEACHER_LOG_PROB.name] = "the run has no teacher; set teacher.path"
    if config.critic is None:
        missing[VALUE.name] = "the run has no critic; set critic={}"
    missing[RETURN.name] = "the critic's loss alone reads it"
    return missing


def users_metrics(config: GrpoConfig) -> list[Metric]:
    """Return the metrics that the user's loss and advantage declare. Wrong declarations are left out; a check reports
    them.
    """
    metrics: list[Metric] = []
    for section in (config.grpo.loss, config.grpo.advantage):
        rows = read_declaration(section, "metrics") or ()
        if not rows_problem(rows):
            metrics += rows
    return metrics


@cache
def user_class(name: str) -> Any:
    """Import and return a user's loss or advantage class; None if the import fails."""
    try:
        return load_object(name)
    except Exception:
        return None
