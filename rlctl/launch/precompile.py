"""Warm-up of compiled trainers at a run's start, so that step 1 takes as long as any other.

It runs while engines start. Where engines and trainer take turns with a device's memory it waits until they sleep.
"""

from typing import TYPE_CHECKING

from rlctl.launch.session import Session
from rlctl.preflight.backend import layout_of
from rlctl.preflight.settled import Settled

if TYPE_CHECKING:
    from rlctl.training.trainer_group import TrainerGroup

# Tokens of a made-up sequence. Attention is not compiled, so that lengths of sequences do not matter.
_SEQUENCE_TOKENS = 512


def precompiles(settled: Settled) -> bool:
    """Return True if a run's trainer is compiled, unless the warm-up of a Ray Compiled Graph compiles it anyway."""
    return settled.trainer.compile and not (settled.sft and settled.sft.config.ray_compiled_graph.enabled)


def precompile(session: Session, settled: Settled, trainer: "TrainerGroup") -> None:
    """Compile the code of a step, on full packs: compilers choose kernels by the first sizes that they see."""
    from rlctl.sft.loss import NllLoss

    pack = settled.trainer.micro_batch_tokens
    length = min(_SEQUENCE_TOKENS, settled.longest_sequence or _SEQUENCE_TOKENS, pack)
    count = pack // length * layout_of(settled.trainer).data
    with session.starting("warm-up"):
        # Dimensions of equal size are compiled as one: a second length keeps them apart.
        for warm_up_length in (length, max(2, length // 2 - 1)):
            trainer.warm_up(count, warm_up_length, NllLoss(), settled.computed_columns)
