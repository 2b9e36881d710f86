"""What a trainer rank's weights, gradients and optimizer state take, and where they stand in each phase. Pure.

Exact for FSDP (float32, sharded over the ranks); for Megatron-core as if its stages were alike.
"""

from dataclasses import dataclass

from rlctl.models.model_sizes import ModelSizes
from rlctl.preflight.backend import STATES, State, StateBytes, backend_of
from rlctl.preflight.offload_plan import Phase, Place, phases, residency
from rlctl.preflight.resolved import DTYPE_BYTES, Resolved


@dataclass(frozen=True)
class PlacedState:
    """A state of one rank in one phase: where it stands, and its bytes on the device and in host memory.

    Both at once where the host updates a part of the optimizer state.
    """

    place: Place
    device: int
    host: int


def placed_states(resolved: Resolved, architecture: ModelSizes) -> dict[Phase, dict[State, PlacedState]]:
    """Return the states by phase of the run. Without a GPU all of them are in host memory."""
    config = resolved.config
    table = residency(config.trainer, resolved.shares_devices)
    held = backend_of(config.trainer).states(config.trainer, architecture, DTYPE_BYTES[resolved.dtype])
    cpu = resolved.device == "cpu"
    return {
        phase: {state: _placed_states(table[phase][state], held[state], cpu) for state in STATES}
        for phase in phases(config)
    }


def _placed_states(place: Place, held: StateBytes, cpu: bool) -> PlacedState:
    if place == "none":
        return PlacedState("none", 0, 0)
    if cpu:
        return PlacedState("host", 0, held.device + held.host)
    # What lives on the host has a part on the device that stays there; what moves there moves whole.
    moved = place == "host" and held.host == 0
    return PlacedState(place, 0, held.device) if moved else PlacedState(place, held.device, held.host)
