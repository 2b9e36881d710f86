"""Warm-up of compiled trainers at a run's start, so that step 1 takes as long as any other.

It runs while engines start. Where engines and trainer take turns with a device's memory it waits until they sleep.
"""

from typing import TYPE_CHECKING

from rlctl.config.fields import stated
from rlctl.config.schema import GrpoConfig, RunConfig
from rlctl.launch.session import Session
from rlctl.preflight.backend import layout_of
from rlctl.preflight.resolved import Resolved, longest_sequence

if TYPE_CHECKING:
    from rlctl.training.trainer_group import TrainerGroup

# Tokens of a made-up sequence. Attention is not compiled, so that lengths of sequences do not matter.
_TOKENS = 512


def precompiles(config: RunConfig) -> bool:
    """Return True if a run's trainer is compiled, and no warm-up of a compiled graph does the same."""
    return stated(config.trainer.compile) and (isinstance(config, GrpoConfig) or not config.ray_compiled_graph.enabled)


def precompile(session: Session, config: RunConfig, trainer: "TrainerGroup") -> None:
    """Compile the code of a step: on full packs, since compilers choose kernels by the first sizes that they see."""
    from rlctl.sft.loss import NllLoss

    pack = stated(config.trainer.micro_batch_tokens)
    length = min(_TOKENS, longest_sequence(config, None) or _TOKENS, pack)
    count = pack // length * layout_of(config.trainer).data
    columns = Resolved(config).computed_columns
    with session.starting("warm-up"):
        # Dimensions of equal size are compiled as one: a second length keeps them apart.
        for each in (length, max(2, length // 2 - 1)):
            trainer.warm_up(count, each, NllLoss(), columns)
