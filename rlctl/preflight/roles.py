"""Roles of a run besides the policy: where their sections are, facts of their models, and the place of each.

A role is `reference`, `teacher`, `teachers.NAME` or rewards.0, the name of its section. `read_role_facts` reads files.
The rest is pure. A swapped pass copies the policy's weights to the host and back, and the role's to the device.
A resident pass copies only the role's weights to the device, which needs room besides the policy's.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rlctl.config.errors import ModelError
from rlctl.config.run_weights import local_adapter
from rlctl.config.schema import RunConfig
from rlctl.models.adapter_folder import read_spec
from rlctl.models.adapters import AdapterSpec
from rlctl.models.facts import ModelSizes
from rlctl.models.model_settings import settings_of
from rlctl.models.model_sizes import config_file, sizes_of
from rlctl.preflight.backend import FLOAT32, backend_of
from rlctl.preflight.choices import USABLE
from rlctl.preflight.declared_columns import (
    CRITIC,
    HeldRole,
    Role,
    RolePlace,
    gives_top,
    read_columns,
    roles_by_column,
)
from rlctl.preflight.machine import Device
from rlctl.preflight.memory import scoring_bytes, show_bytes
from rlctl.preflight.trainer_settings import DTYPE_BYTES, Choice, Dtype, TeacherUse, TrainerSettings
from rlctl.preflight.written_roles import (
    WrittenRole,
    judges_on_engines,
    longest_sequence_of,
    reward_models,
    reward_role,
    written_roles,
)

TEACHER: Role = "teacher"
# Bytes/s of a copy between device and host (H200, bench/README.md), and within the memory of a CPU.
_LINK_RATES: dict[Device, float] = {"cuda": 54e9, "cpu": 5e9}


@dataclass(frozen=True)
class RoleFacts:
    """Facts of a role's model."""

    # None if the model is not on this machine, or is new.
    sizes: ModelSizes | None = None
    # First setting of config.json that differs from the policy's, as `hidden_size 128 -> 256`. None: the architecture
    # is the policy's, or a model is not on this machine.
    difference: str | None = None
    # True for the policy's first weights.
    is_first: bool = False
    # True for adapters over the policy's base, shaped as the trained ones.
    is_adapter: bool = False


@dataclass(frozen=True)
class PlacedRole:
    """A role, and where its weights are."""

    name: Role
    place: RolePlace
    # Reason for the place, with the seconds of a pass's copies.
    reason: str
    # Memory of its weights in the trainer's ranks; None if they need no copy.
    held: HeldRole | None
    # Bytes of all engines that score with it; 0 if none do.
    engines_bytes: int = 0
    # Why there is no room for the role, with the remedy; None if there is.
    problem: str | None = None
    # True if the config leaves the place at `auto`, and the role is not the policy's first weights.
    is_chosen: bool = False


def read_role_facts(
    role: WrittenRole, policy: str, policy_sizes: ModelSizes | None, adapters: AdapterSpec | None
) -> RoleFacts:
    """Read the facts of a role's model. policy: folder or hub name of the run's model. adapters: that the run trains.

    A folder that cannot be read gives no facts. A check reports it.
    """
    if role.weights is None:
        return RoleFacts(sizes=policy_sizes, is_first=True)
    base = role.path or role.weights
    file = config_file(base)
    policy_file = config_file(policy)
    if file is None:
        return RoleFacts()
    sizes = None
    with suppress(ModelError):
        sizes = sizes_of(base)
    if policy_file is None:
        return RoleFacts(sizes)
    difference = first_difference(policy_file.parent, file.parent)
    has_base = file.parent.resolve() == policy_file.parent.resolve()
    adapter = local_adapter(role.weights)
    is_adapter = False
    if adapter and has_base and adapters and sizes:
        with suppress(ModelError):
            is_adapter = replace(read_spec(adapter, sizes.linears), dropout=adapters.dropout) == adapters
    return RoleFacts(sizes, difference, is_adapter=is_adapter)


def first_difference(policy: Path, other: Path) -> str | None:
    """Return the first setting of config.json that differs, as `hidden_size 128 -> 256`; None if none differs."""
    settings = settings_of(policy)
    other_settings = settings_of(other)
    for key in [*settings, *other_settings]:
        if settings.get(key) != other_settings.get(key):
            return f"{key} {settings.get(key)} -> {other_settings.get(key)}"
    return None


@dataclass(frozen=True)
class Room:
    """Memory of a rank's device, and the policy's share while log-probs are computed."""

    device: Device
    # Bytes of the device; None: not known.
    capacity: int | None
    # Bytes that the policy's states and an awake engine take.
    taken: int
    # Tokens of the longest sequence.
    longest: int

    @property
    def usable(self) -> int | None:
        """Bytes of the device that a forecast may fill; None on a CPU, or if they are not known."""
        return None if self.capacity is None or self.device == "cpu" else int(USABLE * self.capacity)


def read_roles(config: RunConfig) -> tuple[Role, ...]:
    """Return the roles besides the policy that a loss or an advantage reads, the reward models and the judges."""
    roles: list[Role] = []
    if reads_divergence(config):
        roles.append(TEACHER)
    for role in dict.fromkeys(roles_by_column(read_columns(config)).values()):
        if role == TEACHER and config.teachers:
            roles += [f"teachers.{name}" for name in config.teachers]
        elif role not in ("policy", CRITIC):
            roles.append(role)
    roles += map(reward_role, sorted([*reward_models(config), *judges_on_engines(config)]))
    return tuple(dict.fromkeys(roles))


def reads_divergence(config: RunConfig) -> bool:
    """Return True if the ranks pass the teacher in an update: for a divergence over more than the sampled token."""
    term = config.distillation
    return term is not None and term.over != "sampled" and not gives_top(config)


def place_roles(
    config: RunConfig, role_facts: Mapping[Role, RoleFacts], policy: ModelSizes, trainer: TrainerSettings, room: Room
) -> dict[Role, PlacedRole]:
    """Return the place of each role that is read, by name. A role without a model is left out; a check reports it."""
    written = written_roles(config)
    placed = {}
    for name in read_roles(config):
        if name in written:
            role = written[name]
            facts = role_facts.get(name, RoleFacts(is_first=role.weights is None))
            is_chosen = role.place == "auto" and role.weights is not None
            placed[name] = replace(_place_role(role, facts, policy, trainer, room), is_chosen=is_chosen)
    return placed


def _place_role(
    role: WrittenRole, facts: RoleFacts, policy: ModelSizes, trainer: TrainerSettings, room: Room
) -> PlacedRole:
    """Return the role with its place: the written one, else the faster of the two that fit."""
    if trainer.teacher and role.name == TEACHER and not trainer.teacher.is_on_engines:
        return _place_distilled(trainer.teacher, facts, policy, trainer, room.device)
    if role.place == "engines":
        return _place_on_engines(role, facts.sizes or policy, trainer.dtype, room)
    if facts.is_first and role.place != "resident":
        return _place_first(role, policy, trainer, room.device)
    role_bytes = _shard_bytes(facts, facts.sizes or policy, trainer, DTYPE_BYTES[trainer.dtype])
    swap_s = _swap_seconds(_live_bytes(facts, policy, trainer), role_bytes, room.device)
    load_s = role_bytes / _LINK_RATES["cuda"] if room.device == "cuda" else 0.0
    reason = f"{swap_s:.2g} s of copies a pass: the policy's weights out and back, and {show_bytes(role_bytes)} in"
    swapped = PlacedRole(role.name, "swapped", reason, HeldRole(role.name, role_bytes, is_resident=False))
    reason = f"{load_s:.2g} s of copies a pass" if load_s else "no copies"
    if facts.difference is None and not role.has_value_head:
        reason += f", against {swap_s:.2g} s if it were swapped"
    resident = PlacedRole(role.name, "resident", reason, HeldRole(role.name, role_bytes, is_resident=True))
    can_swap = facts.difference is None and not role.has_value_head
    if role.place == "swapped" or facts.is_adapter or (can_swap and not backend_of(trainer).holds_residents):
        return swapped
    if room.usable is None or room.taken + role_bytes <= room.usable:
        return resident
    others = f"beside {show_bytes(room.taken)} of the policy, of {show_bytes(room.usable)} usable"
    if can_swap and role.place == "auto":
        return replace(swapped, reason=f"{swapped.reason}; resident does not fit: {show_bytes(role_bytes)} {others}")
    remedy = "more trainer.num_ranks hold it"
    if can_swap:
        remedy = f"{role.name}.place=swapped takes no memory of the device"
    elif role.has_value_head:
        remedy = f"{role.name}.place=engines has GPUs of its own"
    return replace(resident, problem=f"takes {show_bytes(role_bytes)} of each device {others}: {remedy}")


def _place_distilled(
    teacher: TeacherUse, facts: RoleFacts, policy: ModelSizes, trainer: TrainerSettings, device: Device
) -> PlacedRole:
    """Return the place of the teacher from which an update computes a divergence. The forecast counts its memory."""
    rank_bytes = _shard_bytes(facts, teacher.sizes, trainer, DTYPE_BYTES[trainer.dtype])
    if teacher.is_resident:
        reason = f"its pass precedes each micro-batch's loss: {show_bytes(rank_bytes)} of each device in an update"
        return PlacedRole(TEACHER, "resident", reason, HeldRole(TEACHER, rank_bytes, is_resident=True, phase="train"))
    swap_s = _swap_seconds(_live_bytes(facts, policy, trainer), rank_bytes, device)
    side_bytes = teacher.update_tokens * teacher.token_bytes
    reason = f"{swap_s:.2g} s of copies an update, and up to {show_bytes(side_bytes)} of its states wait for the losses"
    return PlacedRole(TEACHER, "swapped", reason, HeldRole(TEACHER, rank_bytes, is_resident=False))


def scoring_roles(config: RunConfig) -> tuple[WrittenRole, ...]:
    """Return the roles that engines of their own score, in the order of their engines."""
    written = written_roles(config)
    return tuple(written[name] for name in read_roles(config) if name in written and written[name].place == "engines")


def _place_on_engines(role: WrittenRole, sizes: ModelSizes, dtype: Dtype, room: Room) -> PlacedRole:
    """Return the role on engines, with the bytes of each device. The role takes nothing of a trainer's device."""
    longest = longest_sequence_of(role, sizes, room.longest)
    items = scoring_bytes(sizes, room.device, dtype, role.tensor_parallel_size, longest)
    arithmetic = ", ".join(f"{purpose} {show_bytes(count)}" for purpose, count in items.items())
    devices = role.num_engines * role.tensor_parallel_size
    where = f"{devices} GPUs of its own, each with {arithmetic}" if room.device == "cuda" else arithmetic
    needed = sum(items.values())
    placed = PlacedRole(role.name, "engines", where, held=None, engines_bytes=needed * devices)
    if room.usable is None or needed <= room.usable:
        return placed
    taken = f"takes {show_bytes(needed)} of each GPU of its engines ({arithmetic}), of {show_bytes(room.usable)} usable"
    return replace(placed, problem=f"{taken}: a larger {role.name}.tensor_parallel_size takes less")


def _place_first(role: WrittenRole, policy: ModelSizes, trainer: TrainerSettings, device: Device) -> PlacedRole:
    """Return the place of the policy's first weights."""
    if trainer.adapters:
        return PlacedRole(role.name, "swapped", "the base with adapters off: no copies", None)
    facts = RoleFacts(policy, is_first=True)
    role_bytes = _shard_bytes(facts, policy, trainer, DTYPE_BYTES[trainer.dtype])
    swap_s = _swap_seconds(_live_bytes(facts, policy, trainer), role_bytes, device)
    reason = f"{swap_s:.2g} s of copies a pass: the policy's weights out and back, its first ones in"
    return PlacedRole(role.name, "swapped", reason, HeldRole(role.name, role_bytes, is_resident=False))


def _swap_seconds(live_bytes: int, role_bytes: int, device: Device) -> float:
    """Return the seconds to copy the policy's weights out and back, and a role's weights in."""
    return (2 * live_bytes + role_bytes) / _LINK_RATES[device]


def _live_bytes(facts: RoleFacts, policy: ModelSizes, trainer: TrainerSettings) -> int:
    """Return the bytes of a rank's weights that a swapped role replaces."""
    # Frozen weights below adapters have the compute dtype.
    size = DTYPE_BYTES[trainer.dtype] if trainer.adapters and not facts.is_adapter else FLOAT32
    return _shard_bytes(facts, policy, trainer, size)


def _shard_bytes(facts: RoleFacts, sizes: ModelSizes, trainer: TrainerSettings, size: int) -> int:
    """Return the bytes of a rank's shard of a role's weights, or of its adapters. size: bytes of a number."""
    shards = backend_of(trainer).shard_counts(trainer)
    if facts.is_adapter and trainer.adapters:
        return -(-trainer.adapters.parameters // shards.weights) * size
    return shards.rank_parameters(sizes) * size


def role_choices(roles: Mapping[Role, PlacedRole]) -> tuple[Choice, ...]:
    """Return the chosen place of each role with `is_chosen`."""
    return tuple(Choice(f"{role.name}.place", role.place, role.reason) for role in roles.values() if role.is_chosen)
