"""Choice of the place of a teacher from which an update computes a divergence, with the trainer's other choices.

Packs, checkpointing and the engines' memory depend on the teacher's memory, so each possible place is tried with them.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from rlctl.config.errors import BrokenValueError
from rlctl.config.schema import RunConfig
from rlctl.models.facts import ModelSizes
from rlctl.preflight.choices import USABLE, Basis, Chosen, choose
from rlctl.preflight.critic_choice import critic_bytes
from rlctl.preflight.declared_columns import Role, gives_top
from rlctl.preflight.memory import trainer_bytes
from rlctl.preflight.roles import TEACHER, RoleFacts, reads_divergence
from rlctl.preflight.trainer_settings import DTYPE_BYTES, Dtype, TeacherUse, TrainerSettings


def choose_with_teacher(basis: Basis, config: RunConfig, role_facts: Mapping[Role, RoleFacts]) -> Chosen:
    """Return `choose`, with the first place of the teacher that fits a training rank, else with the last one."""
    if isinstance(basis.trainer, TrainerSettings):
        # The recipe of an SFT run gets settings that are chosen, with the teacher of the run.
        return choose(replace(basis, teacher=basis.trainer.teacher))
    basis = replace(basis, critic_bytes=critic_bytes(config, basis))
    needs_teacher = False
    # A broken loss is its own problem, and not one of the trainer's values.
    with suppress(BrokenValueError):
        needs_teacher = reads_divergence(config) or gives_top(config)
    if basis.facts is None or not needs_teacher:
        return choose(basis)
    teachers = _possible_sizes(config, role_facts, basis.facts, basis.dtype, basis.longest_sequence or 0)
    possible = [choose(replace(basis, teacher=teacher)) for teacher in teachers]
    return next((chosen for chosen in possible if _fits(chosen, basis)), possible[-1])


def _fits(chosen: Chosen, basis: Basis) -> bool:
    """Return True unless the forecast of a training rank exceeds the usable memory of its GPU."""
    if basis.device == "cpu" or basis.memory is None or basis.facts is None:
        return True
    return sum(trainer_bytes(chosen.trainer, basis.facts, basis.device).values()) <= USABLE * basis.memory


def _possible_sizes(
    config: RunConfig, role_facts: Mapping[Role, RoleFacts], policy: ModelSizes, dtype: Dtype, longest: int
) -> list[TeacherUse]:
    """Return the teacher of the loss's divergence at each place that it may have, the fastest first.

    longest: tokens of the longest sequence.
    """
    term = config.distillation
    assert term is not None
    facts = role_facts.get(TEACHER, RoleFacts())
    sizes = facts.sizes or policy
    # An id of 8 bytes and a log-prob of 4 for each of the likeliest tokens.
    side_bytes = 12 * term.num_top_tokens if term.over == "top_k" else sizes.hidden * DTYPE_BYTES[dtype]
    step = config.step_shape
    rows = -(-step.prompts * step.group // (step.updates * config.trainer.num_ranks))
    resident = TeacherUse(sizes, is_resident=True, token_bytes=side_bytes, update_tokens=rows * longest)
    swapped = replace(resident, is_resident=False)
    if gives_top(config):
        return [replace(swapped, is_on_engines=True)]
    written = config.teacher.place if config.teacher else "auto"
    if written == "swapped" or facts.is_adapter:
        return [swapped]
    return [resident] if written == "resident" or facts.difference else [resident, swapped]
