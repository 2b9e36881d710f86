"""What a trainer rank's weights, gradients and optimizer state take, and where they stand in each phase. Pure.

Exact for FSDP (float32, sharded over the ranks); for Megatron-core as if its stages were alike.
"""

from dataclasses import dataclass

from rlctl.config.schema import RunConfig
from rlctl.models.model_sizes import Architecture
from rlctl.preflight import derived
from rlctl.preflight.backend import STATES, State, StateBytes, backend_of
from rlctl.preflight.offload_plan import Phase, Place, phases, residency


@dataclass(frozen=True)
class PlacedState:
    """A state of one rank in one phase: where it stands, and its bytes on the device and in host memory.

    Both at once where the host updates a part of the optimizer state.
    """

    place: Place
    device: int
    host: int


def standing(
    config: RunConfig, architecture: Architecture, size: int, gpus: int
) -> dict[Phase, dict[State, PlacedState]]:
    """By phase of the run; size as for `Backend.states`. Without a GPU all of it is in host memory."""
    table = residency(config.trainer, derived.shares_devices(config))
    held = backend_of(config.trainer).states(config.trainer, architecture, size)
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
