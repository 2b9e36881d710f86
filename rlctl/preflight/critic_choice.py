"""Memory of the critic on the trainer's GPUs, for the choices of packs and of the engines' share."""

from contextlib import suppress
from dataclasses import replace

from rlctl.config.critic_schema import CriticSection
from rlctl.config.errors import BrokenValueError, ModelError
from rlctl.config.schema import GrpoConfig, RunConfig
from rlctl.models.facts import ModelSizes
from rlctl.models.model_sizes import sizes_of
from rlctl.preflight.backend import FLOAT32
from rlctl.preflight.choices import Basis


def sizes_of_critic(section: CriticSection, policy: ModelSizes | None) -> ModelSizes | None:
    """Return the sizes of the critic, which has a value head; None if its model is not on this machine."""
    sizes = policy
    if section.path is not None:
        sizes = None
        with suppress(ModelError):
            sizes = sizes_of(section.path)
    if sizes is None or sizes.head_kind == "value":
        return sizes
    head_parameters = 0 if sizes.tied else sizes.embedding_parameters
    parameters = sizes.parameters - head_parameters + sizes.hidden + 1
    return replace(sizes, head_kind="value", tied=False, parameters=parameters)


def critic_bytes(config: RunConfig, basis: Basis) -> int:
    """Return the bytes of the critic's weights on a rank's GPU; 0 without critic, on a CPU, or for unknown sizes."""
    if not isinstance(config, GrpoConfig) or basis.device == "cpu" or basis.facts is None:
        return 0
    with suppress(BrokenValueError):
        section = config.critic
        sizes = sizes_of_critic(section, basis.facts) if section else None
        if section and sizes:
            ranks = section.num_ranks or basis.trainer.num_ranks
            return -(-sizes.parameters // ranks) * FLOAT32
    return 0
