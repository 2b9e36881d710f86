"""Settled run: config, machine and model facts, with every value that follows from them. Pure.

`settle` creates it. Code that needs the value of a key at `auto` reads it there. Three keys are resolved elsewhere:
`refit.transport` from the placement (`placement.transport_of`), `refit.mode` from an engine's free memory
(`generation`), and `data.chat_template` from the tokenizer (`chat.make_chat`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, overload

from rlctl.config.fields import RECIPE
from rlctl.config.grpo_schema import AdvantageScope, UserLossSection
from rlctl.config.plugins import model_rewards
from rlctl.config.schema import GrpoConfig, RunConfig, SftConfig
from rlctl.config.trainer_schema import TrainerSection
from rlctl.models.adapters import AdapterSpec, choose_targets
from rlctl.models.facts import ModelSizes
from rlctl.preflight.choices import Basis, Chosen
from rlctl.preflight.declared_columns import (
    PROXIMAL_LOG_PROB,
    HeldRole,
    Role,
    read_columns,
    read_declaration,
    roles_by_column,
    user_class,
)
from rlctl.preflight.derived import NotKnownError, derived
from rlctl.preflight.machine import Device, RunMachine
from rlctl.preflight.memory import PHASES, Phase, placed_states
from rlctl.preflight.roles import PlacedRole, RoleFacts, Room, place_roles, read_roles, role_choices
from rlctl.preflight.teacher_choice import choose_with_teacher
from rlctl.preflight.trainer_settings import Choice, Dtype, GenerationSettings, TrainerSettings


@dataclass(frozen=True)
class Settled:
    """A run of any kind with a value for each `auto`. Fields of the other kind are None."""

    config: RunConfig
    machine: RunMachine
    # None if the model is not on this machine.
    facts: ModelSizes | None
    # Facts of the models of `written_roles`, by role; a role that is not here has none.
    role_facts: Mapping[Role, RoleFacts] = field(default_factory=dict)

    @derived
    def grpo(self) -> "SettledGrpo | None":
        """This run, if it is a GRPO run, else None."""
        return None

    @derived
    def sft(self) -> "SettledSft | None":
        """This run, if it is an SFT run, else None."""
        return None

    @derived
    def sampling(self) -> "SettledGrpo | None":
        """GRPO config by which the engines sample: this run, or the recipe that validates an SFT run. None without
        engines.
        """
        return None

    @derived
    def device(self) -> Device:
        """Kind of device, cpu or cuda. Raises NotKnownError while it is not known."""
        if self.machine.device is None:
            raise NotKnownError("the device is not known yet")
        return self.machine.device

    @derived
    def dtype(self) -> Dtype:
        """Compute dtype of the trainer. `auto` is float32 on a CPU, because bfloat16 has no fast kernels and too few
        digits for tests there.
        """
        dtype = self.config.trainer.dtype
        if dtype == "auto":
            return "float32" if self.device == "cpu" else "bfloat16"
        return dtype

    @derived
    def adapters(self) -> AdapterSpec | None:
        """Adapters that are trained; None if all weights are trained."""
        section = self.config.lora
        if section is None:
            return None
        if self.facts is None:
            raise NotKnownError("the model's linear layers are not known yet")
        targets, _ = choose_targets(self.facts.linears, section.targets)
        return AdapterSpec(
            rank=section.rank, alpha=section.alpha, rslora=section.rslora, dropout=section.dropout, targets=targets
        )

    @derived
    def export_dtype(self) -> Dtype:
        """Dtype of exported Hugging Face folders. `auto` is the trainer's compute dtype."""
        dtype = self.config.checkpoint.export_dtype
        return self.dtype if dtype == "auto" else dtype

    @derived
    def validates(self) -> bool:
        """True if there is something to measure every `validation.every` steps."""
        return self.config.validation.every > 0 and self.config.data.has_validation

    @derived
    def shares_devices(self) -> bool:
        """True if engines share the trainer's devices. On a CPU engines never sleep."""
        return self.sampling is not None and self.sampling.is_colocated

    @derived
    def max_length(self) -> int:
        """Tokens of the longest sequence that the model and the config allow."""
        if self._longest_of_model is None:
            raise NotKnownError(f"{self.config.model.path} is not on this machine: its longest sequence is not known")
        return self.config.model.max_length or self._longest_of_model

    @derived
    def longest_sequence(self) -> int | None:
        """Tokens of the run's longest sequence; None if that is not known before the data is read."""
        return None if self._longest_of_model is None else self.max_length

    @derived
    def longest_rollout(self) -> int | None:
        """Tokens that one micro-batch must hold; None if that is not known before the data is read."""
        return self.longest_sequence

    @property
    def update_tokens(self) -> int | None:
        """Most tokens of a rank's share of an update; None: not bounded."""
        return None

    @property
    def _longest_of_model(self) -> int | None:
        return self.facts.max_positions if self.facts else self.config.model.max_length

    @derived
    def computed_columns(self) -> dict[str, Role]:
        """Name -> role of the columns that a step computes before its advantages and updates."""
        return {}

    @derived
    def frozen_roles(self) -> tuple[Role, ...]:
        """Roles besides the policy that the loss or the advantage reads; each of several teachers."""
        return read_roles(self.config)

    @derived
    def placed_roles(self) -> dict[Role, PlacedRole]:
        """Place of each of `frozen_roles`; empty until the model's sizes are known."""
        if self.facts is None:
            return {}
        states = placed_states(self.trainer, self.facts, self.device, self.shares_devices, phases=("log_probs",))
        taken = sum(state.device for state in states["log_probs"].values())
        if self.sampling and self.shares_devices and not self.sampling.generation.sleep:
            taken += int(self.sampling.generation.gpu_memory_utilization * (self.machine.memory or 0))
        room = Room(self.device, self.machine.memory, taken, self.max_length)
        return place_roles(self.config, self.role_facts, policy=self.facts, trainer=self.trainer, room=room)

    @property
    def values_in_ranks(self) -> bool:
        """True if a reward model is in the trainer's ranks."""
        return False

    @property
    def held_roles(self) -> tuple[HeldRole, ...]:
        """Memory of the roles that have a copy of weights. The base below adapters needs none."""
        return tuple(role.held for role in self.placed_roles.values() if role.held)

    @derived
    def phases(self) -> tuple[Phase, ...]:
        """Phases of a step of this run, in order. `generate` is one only if engines share the trainer's devices."""
        has_phase = {"generate": self.shares_devices, "refit": self.sampling is not None}
        has_phase["log_probs"] = bool(self.computed_columns) or self.values_in_ranks
        return tuple(phase for phase in PHASES if has_phase.get(phase, True))

    @derived
    def trainer(self) -> TrainerSettings:
        """Section `trainer` with a value for each `auto`."""
        return self._chosen_values.trainer

    @derived
    def choices(self) -> tuple[Choice, ...]:
        """Values of the keys that were left at `auto`, with reasons."""
        return self._chosen_values.choices + role_choices(self.placed_roles)

    @derived
    def _chosen_values(self) -> Chosen:
        return choose_with_teacher(self._basis(self.config.trainer, None), self.config, self.role_facts)

    def _basis(self, trainer: TrainerSection, engines: tuple[GrpoConfig, Dtype] | None) -> Basis:
        return Basis(
            trainer=trainer,
            dtype=self.dtype,
            device=self.device,
            facts=self.facts,
            adapters=self.adapters if self.facts else None,
            memory=self.machine.memory,
            longest_sequence=self.longest_sequence,
            longest_rollout=self.longest_rollout,
            update_tokens=self.update_tokens,
            shares_devices=self.shares_devices,
            ranks_by_node=self.machine.ranks_by_node,
            engines=engines,
        )

    def trainer_threads(self, cores: int, ranks: int, engines: int) -> int:
        """Return the number of CPU threads per rank for `ranks` ranks and `engines` engines on a machine with `cores`
        cores.

        In an asynchronous run each engine keeps one core. A step of the tiny one took 0.57 s so on two cores, not 0.63.
        """
        sampling_engines = engines if self.grpo and self.grpo.config.async_.enabled else 0
        return self.config.trainer.threads or max(1, (cores - sampling_engines) // ranks)

    def settle_on(
        self, machine: RunMachine, facts: ModelSizes | None, role_facts: Mapping[Role, RoleFacts] | None = None
    ) -> Self:
        """Return the same config settled for `machine` and `facts`. role_facts: None keeps those of before."""
        return replace(self, machine=machine, facts=facts, role_facts=role_facts or self.role_facts)


@dataclass(frozen=True)
class SettledGrpo(Settled):
    """A GRPO run, or the recipe by which an SFT run is validated."""

    config: GrpoConfig
    # SFT run that the recipe validates; its trainer settings are used. None for a GRPO run.
    run: "SettledSft | None" = None

    @derived
    def grpo(self) -> "SettledGrpo | None":
        """This run."""
        return self

    @derived
    def sampling(self) -> "SettledGrpo | None":
        """This run."""
        return self

    @derived
    def generation(self) -> GenerationSettings:
        """Section `generation` with a value for each `auto`."""
        assert self._chosen_values.generation
        return self._chosen_values.generation

    @derived
    def _chosen_values(self) -> Chosen:
        section = self.run.trainer if self.run else self.config.trainer
        basis = self._basis(section, (self.config, self.generation_dtype))
        return choose_with_teacher(basis, self.config, self.role_facts)

    @derived
    def generation_dtype(self) -> Dtype:
        """Dtype of an engine's weights. `auto` is the trainer's compute dtype."""
        dtype = self.config.generation.dtype
        return self.dtype if dtype == "auto" else dtype

    @derived
    def checksum(self) -> Literal["all", "sampled", "off"]:
        """Weights whose checksums are compared between trainer and engines at each refit."""
        checksum = self.config.refit.checksum
        if checksum == "auto":
            return "all" if self.device == "cpu" or self.config.lora else "sampled"
        return checksum

    @derived
    def is_colocated(self) -> bool:
        """True if engines share the trainer's devices, and the two take turns."""
        written = self.config.placement.colocated
        return not self.config.async_.enabled if written is None else written

    @derived
    def proximal(self) -> Literal["rollout", "recompute"]:
        """Policy in the denominator of the loss's ratio: the one that sampled (rollout), or a recomputed one."""
        loss = self.config.grpo.loss
        if loss.proximal != "auto":
            return loss.proximal
        needs_own_pass = self.config.compares_apart or read_declaration(loss, "recomputes")
        return "recompute" if needs_own_pass else "rollout"

    @derived
    def on_policy_ratio(self) -> bool:
        """True if the proximal log-probs need no separate forward pass, because the proximal policy is the policy being
        updated.

        That holds with one update a step: both log-probs come from the same weights, the ratio is 1, and only its
        gradient matters.
        """
        if self.proximal != "recompute":
            return False
        written = self.config.grpo.loss.force_on_policy_ratio
        return self.config.grpo.updates_per_step == 1 if written is None else written

    @derived
    def clips(self) -> bool:
        """True if the loss clips the ratio."""
        return bool(read_declaration(self.config.grpo.loss, "clips"))

    @derived
    def computed_columns(self) -> dict[str, Role]:
        """Name -> role of the columns that a step computes before its advantages and updates."""
        columns = read_columns(self.config)
        if self.proximal == "recompute" and not self.on_policy_ratio:
            columns = columns | {PROXIMAL_LOG_PROB.name}
        return roles_by_column(columns)

    @property
    def values_in_ranks(self) -> bool:
        """True if a reward model is in the trainer's ranks."""
        return any(reward.place != "engines" for reward in model_rewards(self.config.rewards).values())

    @derived
    def learns_from_rewards(self) -> bool:
        """True if a rollout's advantage may differ from 0. Without it the loss's distillation term alone teaches."""
        return self.config.has_turns or any(reward.weight for reward in self.config.rewards)

    @derived
    def whole_rollouts(self) -> bool:
        """True if the loss reads all rows of a rollout together, so that one micro-batch must hold them."""
        loss = self.config.grpo.loss
        if not isinstance(loss, UserLossSection):
            return loss.whole_rollouts
        try:
            return bool(user_class(loss.name).from_settled(self).needs.whole_rollouts)
        except Exception:
            # A check reports that the loss cannot be created.
            return False

    @derived
    def advantage_scope(self) -> AdvantageScope:
        """Rollouts on which one advantage depends: its group's, or all of the step's (batch)."""
        return "batch" if read_declaration(self.config.grpo.advantage, "scope") == "batch" else "group"

    @derived
    def streams_training(self) -> bool:
        """True if a step begins to train before all of its groups are sampled.

        That needs one update a step, no computed columns, no reward model, and advantages within one group.
        """
        rules = self.config.async_
        if not (rules.enabled and rules.streamed_training and self.config.grpo.updates_per_step == 1):
            return False
        return not (self.computed_columns or model_rewards(self.config.rewards)) and self.advantage_scope == "group"

    @derived
    def max_length(self) -> int:
        """Tokens of the longest sequence that the model, the config and the environment allow."""
        return min(super().max_length, self.config.environment.max_length or super().max_length)

    @derived
    def longest_sequence(self) -> int | None:
        """Tokens of the run's longest sequence; None if that is not known before the data is read."""
        limit = super().longest_sequence
        prompt_tokens = self.config.data.max_prompt_length
        if prompt_tokens is None:
            return limit
        needed_tokens = prompt_tokens + self.config.generation.max_new_tokens
        return needed_tokens if limit is None else min(limit, needed_tokens)

    @property
    def update_tokens(self) -> int | None:
        """Bound of the SFT run that this recipe validates. A GRPO run has none: a rollout has any number of rows."""
        return self.run.update_tokens if self.run else None

    @derived
    def longest_rollout(self) -> int | None:
        """Tokens that one micro-batch must hold; None if that is not known before the data is read.

        Usually it is the longest sequence. If the loss needs whole rollouts and `environment.history` is `strip`, the
        history may be rewritten at each turn, and a rollout has one sequence per turn. Rollout functions may return any
        number of rows; one is assumed here.
        """
        section = self.config.environment
        longest = self.longest_sequence
        if longest is None:
            return None
        strips_history = section.is_enabled and section.history == "strip"
        return longest * section.max_turns if strips_history and self.whole_rollouts else longest


@dataclass(frozen=True)
class SettledSft(Settled):
    """An SFT run."""

    config: SftConfig

    @derived
    def sft(self) -> "SettledSft | None":
        """This run."""
        return self

    @property
    def update_tokens(self) -> int | None:
        """Most tokens of a rank's share of an update, if each rank is a shard of the batch, as with FSDP.

        `plan_micro_batches` gives no rank more than batch_size / ranks, rounded up, times the longest sequence.
        """
        longest = self.longest_sequence
        if longest is None:
            return None
        return -(-self.config.sft.batch_size // self.config.trainer.num_ranks) * longest

    @derived
    def validates(self) -> bool:
        """True if there is something to measure every `validation.every` steps."""
        section = self.config.validation
        return section.every > 0 and (self.config.data.has_validation or section.recipe is not None)

    @derived
    def sampling(self) -> SettledGrpo | None:
        """The GRPO recipe of its validation, with this run's model, trainer and deadlines."""
        config = self.config
        recipe = config.validation.recipe
        if recipe is None or config.validation.every == 0:
            return None
        sampled = replace(
            recipe,
            run=replace(config.run, seed=recipe.run.seed),
            model=replace(config.model, max_length=recipe.model.max_length),
            # The recipe measures: no other model scores its rollouts.
            teacher=None,
            teachers={},
            lora=config.lora,
            trainer=config.trainer,
            placement=replace(
                recipe.placement,
                trainer=config.placement.trainer,
                cpus_per_process=config.placement.cpus_per_process,
            ),
        )
        return SettledGrpo(sampled, self.machine, self.facts, run=self)

    @derived
    def choices(self) -> tuple[Choice, ...]:
        """Values of the keys that were left at `auto`, with reasons; those of the validation's recipe too."""
        recipe_choices = self.sampling.choices if self.sampling else ()
        return super().choices + tuple(replace(choice, key=f"{RECIPE}.{choice.key}") for choice in recipe_choices)


@overload
def settle(config: GrpoConfig, machine: RunMachine, facts: ModelSizes | None) -> SettledGrpo: ...
@overload
def settle(config: RunConfig, machine: RunMachine, facts: ModelSizes | None) -> Settled: ...
def settle(config: Any, machine: RunMachine, facts: ModelSizes | None) -> Settled:
    """Return the settled run of `config` on `machine`. facts: of its model; None: the model is not on this machine."""
    settled: Settled = _KINDS[type(config)](config, machine, facts)
    return settled


_KINDS: dict[type, type[Any]] = {GrpoConfig: SettledGrpo, SftConfig: SettledSft}
