"""The critic before a run starts: its trainer's settings, its memory, and contradictions of its keys. Pure.

The critic's ranks share the devices of the trainer's first ranks. Policy and critic take turns. Each keeps its float32
weights on the device. The critic's optimizer state is on the host while the policy works.
"""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rlctl.config.errors import BrokenValueError, ModelError
from rlctl.config.grpo_schema import AdvantageSection, UserAdvantageSection
from rlctl.config.plugins import ADVANTAGE_BASE
from rlctl.config.run_weights import chat_folder, local_folder
from rlctl.models.facts import ModelSizes
from rlctl.models.model_sizes import check_config, config_file
from rlctl.models.vocabulary import vocabulary_problem
from rlctl.models.weight_headers import check_weights
from rlctl.preflight.backend import State, Violation, Violations, backend_of
from rlctl.preflight.critic_choice import sizes_of_critic
from rlctl.preflight.declared_columns import CRITIC, VALUE, Role, named_columns, user_class
from rlctl.preflight.memory import Phase, PlacedState, trainer_bytes
from rlctl.preflight.settled import Settled, SettledGrpo
from rlctl.preflight.trainer_settings import DTYPE_BYTES, TrainerSettings
from rlctl.utils.user_code import load_object

_GAE = "grpo.advantage.name"
PlacedStates = dict[Phase, dict[State | Role, PlacedState]]


def critic_settings(settled: Settled) -> TrainerSettings | None:
    """Return the settings of the critic's trainer, those of the policy but for a few; None without critic.

    FSDP trains every weight, whatever backend trains the policy.
    """
    section = settled.grpo.config.critic if settled.grpo else None
    if section is None:
        return None
    trainer = settled.trainer
    return replace(
        trainer,
        backend="fsdp",
        num_ranks=section.num_ranks or trainer.num_ranks,
        replicas=trainer.replicas if section.num_ranks is None else 1,
        optimizer=section.optimizer,
        offload_optimizer_for_logprob=False,
        offload_optimizer_for_generation=settled.device == "cuda",
        update_tokens=None,
        adapters=None,
        teacher=None,
        critic_bytes=0,
    )


def critic_sizes(settled: Settled) -> ModelSizes | None:
    """Return the sizes of the critic, which has a value head; None if its model is not on this machine."""
    section = settled.grpo.config.critic if settled.grpo else None
    return sizes_of_critic(section, settled.facts) if section else None


def critic_bytes_on_cpu(settled: Settled) -> dict[str, int]:
    """Return purpose -> bytes of a rank of the critic on a CPU; empty without critic."""
    trainer = critic_settings(settled)
    sizes = critic_sizes(settled)
    if trainer is None or sizes is None:
        return {}
    return {f"critic: {name}": count for name, count in trainer_bytes(trainer, sizes, "cpu").items()}


def add_critic_on_cpu(settled: Settled, placed: PlacedStates) -> PlacedStates:
    """Return the states of a rank on a CPU, and the critic's."""
    trainer = critic_settings(settled)
    sizes = critic_sizes(settled)
    if trainer is None or sizes is None:
        return placed
    states = backend_of(trainer).states(trainer, sizes, DTYPE_BYTES[trainer.dtype])
    resting = PlacedState("host", device=0, host=states["parameters"].device + states["optimizer"].device)
    return {phase: {**phase_states, CRITIC: resting} for phase, phase_states in placed.items()}


def critic_note(settled: Settled) -> str | None:
    """Return a line on the critic for the plan; None without critic."""
    trainer = critic_settings(settled)
    if trainer is None:
        return None
    ranks = "1 rank" if trainer.num_ranks == 1 else f"{trainer.num_ranks} ranks"
    place = "on the trainer's cores" if settled.device == "cpu" else "on the trainer's GPUs, which both use in turn"
    return f"critic: {ranks} {place}"


def check_critic(settled: SettledGrpo) -> Violations:
    """Find a critic without a reader or a reader without a critic, and models that cannot be one."""
    config = settled.config
    reads_values = VALUE.name in named_columns(config.grpo.advantage)
    section = config.critic
    if section is None:
        if reads_values:
            yield Violation(_GAE, "needs a critic: set critic={}, or another advantage", ("critic",))
        return
    if not reads_values:
        message = f"nothing reads its values: set {_GAE}=gae, or critic=null"
        yield Violation("critic", message, (_GAE,))
    elif not _gives_returns(config.grpo.advantage):
        message = "reads value: define learned_columns too, which gives the critic its returns"
        yield Violation(_GAE, message, ("critic",))
    elif config.grpo.dynamic_sampling.filter == "rewards":
        message = "rewards leaves out groups of equal rewards, from which a critic learns: set null or accuracy"
        yield Violation("grpo.dynamic_sampling.filter", message, (_GAE,))
    with suppress(BrokenValueError):
        yield from _check_numbers(settled)
    if len(section.optimizer.betas) != 2:
        yield Violation("critic.optimizer.betas", f"must be two numbers, not {len(section.optimizer.betas)}")
    if section.path is not None:
        yield from _check_model(settled, section.path)


def _gives_returns(section: AdvantageSection) -> bool:
    """Return False for a user's class that reads values and leaves the critic without returns."""
    kind = user_class(section.name) if isinstance(section, UserAdvantageSection) else None
    if kind is None:
        return True
    base = load_object(ADVANTAGE_BASE)
    return kind.learned_columns is not base.learned_columns


def _check_numbers(settled: SettledGrpo) -> Violations:
    """Find more critic ranks than trainer ranks, too small updates, and a warm-up that never ends."""
    config = settled.config
    section = config.critic
    assert section is not None
    ranks = config.trainer.num_ranks
    if section.num_ranks is not None and section.num_ranks > ranks:
        message = f"must be at most trainer.num_ranks={ranks}, whose devices they share, not {section.num_ranks}"
        yield Violation("critic.num_ranks", message, ("trainer.num_ranks",))
    prompts = config.grpo.num_prompts_per_step
    if section.updates_per_step > prompts:
        message = f"must be at most the {prompts} prompts of a step, not {section.updates_per_step}"
        yield Violation("critic.updates_per_step", message, ("grpo.num_prompts_per_step",))
    if section.warm_up_steps >= config.grpo.num_steps:
        message = f"must be below grpo.num_steps={config.grpo.num_steps}, or the policy never learns"
        yield Violation("critic.warm_up_steps", f"{message}; not {section.warm_up_steps}", ("grpo.num_steps",))


def _check_model(settled: SettledGrpo, path: str) -> Violations:
    """Find a folder that is no model, or has another vocabulary than the policy's."""
    file = config_file(path)
    if file is None:
        if os.path.isdir(path):
            yield Violation("critic.path", f"{path} has no config.json; needed: a Hugging Face model folder")
        return
    try:
        check_config(file)
        if os.path.isdir(path):
            check_weights(file.parent)
        model = settled.config.model
        policy = local_folder(model.tokenizer or chat_folder(model.path))
        sizes = critic_sizes(settled)
        if policy and (problem := vocabulary_problem(policy, Path(file.parent), sizes.vocab if sizes else None)):
            yield Violation("critic.path", problem, ("model.path",))
    except ModelError as error:
        yield Violation("critic.path", str(error))
