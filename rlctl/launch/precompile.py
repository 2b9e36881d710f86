"""Warm-up of compiled trainers at a run's start, so that step 1 is as fast as later steps.

The warm-up runs while engines start. If engines share the trainer's devices, it runs later, while they sleep.
"""

from typing import TYPE_CHECKING

from rlctl.launch.session import Session
from rlctl.preflight.backend import layout_of
from rlctl.preflight.roles import TEACHER
from rlctl.preflight.settled import Settled
from rlctl.preflight.written_roles import written_roles

if TYPE_CHECKING:
    from rlctl.training.trainer_group import TrainerGroup

# Tokens of each dummy sequence. Attention is not compiled, so the length does not matter.
_SEQUENCE_TOKENS = 512


def precompiles(settled: Settled) -> bool:
    """Return True if the trainer uses torch.compile. The warm-up of a Ray Compiled Graph compiles it too; then return
    False.
    """
    return settled.trainer.compile and not (settled.sft and settled.sft.config.ray_compiled_graph.enabled)


def precompile(session: Session, settled: Settled, trainer: "TrainerGroup") -> None:
    """Compile the code of a step on full dummy packs, because compilers choose kernels by the first sizes."""
    from rlctl.sft.loss import NllLoss

    pack = settled.trainer.micro_batch_tokens
    length = min(_SEQUENCE_TOKENS, settled.longest_sequence or _SEQUENCE_TOKENS, pack)
    count = pack // length * layout_of(settled.trainer).data
    term = None
    policy = ("policy",) if "policy" in settled.computed_columns.values() else ()
    on_engines = {name for name, role in settled.placed_roles.items() if role.place == "engines"}
    in_ranks = [role for role in settled.frozen_roles if role not in on_engines]
    valuing = [role for role in in_ranks if written_roles(settled.config)[role].has_value_head]
    roles = policy + tuple(role for role in in_ranks if role not in valuing)
    if settled.trainer.teacher and not settled.trainer.teacher.is_on_engines:
        # The teacher's pass is part of each update.
        term = settled.config.distillation
        roles = tuple(role for role in roles if role != TEACHER)
    with session.starting("warm-up"):
        # torch.compile treats dimensions of equal size as one. A second length keeps them apart.
        for warm_up_length in (length, max(2, length // 2 - 1)):
            trainer.warm_up(count, warm_up_length, NllLoss(distillation=term), roles, valuing=valuing)
