"""What a trainer rank's weights, gradients and optimizer state take, and where they stand in each phase. Pure.

Exact for FSDP (float32, sharded over the ranks); for Megatron-core as if its stages were alike.
"""

from dataclasses import dataclass

from rlctl.config.schema import RunConfig, TrainerSection
from rlctl.models.model_sizes import Architecture
from rlctl.preflight import derived
from rlctl.preflight.offload_plan import STATES, Phase, Place, State, phases, residency
from rlctl.preflight.parallel_layout import hosted_share

FLOAT32 = 4


@dataclass(frozen=True)
class PlacedState:
    """A state of one rank in one phase: where it stands, and its bytes on the device and in host memory.

    Both at once where the host updates a part of the optimizer state.
    """

    place: Place
    device: int
    host: int


@dataclass(frozen=True)
class StateBytes:
    """A state of one rank while it trains: bytes on the device and in host memory."""

    name: str
    device: int
    host: int = 0


@dataclass(frozen=True)
class ShardCounts:
    """Among how many ranks something is shared: matrices, the tokens of a pack, weights, experts, optimizer state."""

    tensor: int
    context: int
    weights: int
    experts: int
    optimizer: int

    def of(self, architecture: Architecture) -> int:
        """Parameters of one rank."""
        dense = architecture.parameters - architecture.expert_parameters
        return -(-dense // self.weights) + -(-architecture.expert_parameters // self.experts)


def parts(trainer: TrainerSection) -> ShardCounts:
    """How the ranks share the work."""
    ranks, layout = trainer.num_ranks, trainer.megatron
    if trainer.backend == "fsdp":
        return ShardCounts(1, 1, ranks, ranks, ranks)
    tensor = layout.tensor_model_parallel_size
    stages = layout.pipeline_model_parallel_size
    # An expert is on one rank whole. The distributed optimizer shares state among all ranks with the same weights.
    experts = stages * layout.expert_model_parallel_size
    return ShardCounts(tensor, layout.context_parallel_size, tensor * stages, experts, max(tensor * stages, ranks))


def states(trainer: TrainerSection, architecture: Architecture, size: int) -> dict[State, StateBytes]:
    """Of one rank. size: bytes of one number of the compute dtype.

    FSDP: float32 masters and AdamW's two moments. Megatron-core: weights in the compute dtype, and in its optimizer
    float32 masters besides if that is a half; where the host updates a share of the parameters, their masters, a copy
    of their gradients and moments are all there.
    """
    shared = parts(trainer)
    weights, sharded = shared.of(architecture), -(-architecture.parameters // shared.optimizer)
    gradients = StateBytes("gradients", weights * FLOAT32)
    if trainer.backend == "fsdp":
        moments = StateBytes("AdamW moments", 2 * sharded * FLOAT32)
        return {
            "parameters": StateBytes("weights, float32", weights * FLOAT32),
            "gradients": gradients,
            "optimizer": moments,
        }
    away = hosted_share(trainer)
    masters = FLOAT32 if size < FLOAT32 else 0
    device, host = sharded * (masters + 2 * FLOAT32) * (1 - away), sharded * 4 * FLOAT32 * away
    return {
        "parameters": StateBytes(f"weights, {'bfloat16' if masters else 'float32'}", weights * size),
        "gradients": gradients,
        "optimizer": StateBytes("AdamW state", int(device), int(host)),
    }


def standing(
    config: RunConfig, architecture: Architecture, size: int, gpus: int
) -> dict[Phase, dict[State, PlacedState]]:
    """By phase of the run; size as for `states`. Without a GPU all of it is in host memory."""
    table = residency(config.trainer, derived.shares_devices(config))
    held = states(config.trainer, architecture, size)
    return {
        phase: {state: _standing(table[phase][state], held[state], gpus) for state in STATES}
        for phase in phases(config)
    }


def _standing(place: Place, held: StateBytes, gpus: int) -> PlacedState:
    if place == "none":
        return PlacedState("none", 0, 0)
    if gpus == 0:
        return PlacedState("host", 0, held.device + held.host)
    # What lives on the host has a part on the device that stays there; what moves there moves whole.
    moved = place == "host" and held.host == 0
    return PlacedState(place, 0, held.device) if moved else PlacedState(place, held.device, held.host)
