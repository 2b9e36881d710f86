"""Interface of a training backend before anything starts: layout rules, memory facts, checks. No torch.

A backend NAME is two things: `preflight/backends/NAME.py`, whose `BACKEND` implements `Backend`, and
`training/NAME/trainer.py`, whose `TRAINER` trains. Nothing else knows a backend by name.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from rlctl.config.schema import TrainerSection
from rlctl.models.model_sizes import ModelSizes
from rlctl.preflight.parallel_layout import Layout

FLOAT32 = 4
State = Literal["parameters", "gradients", "optimizer"]
STATES: tuple[State, ...] = ("parameters", "gradients", "optimizer")
# (key, what is wrong, other keys that it contradicts)
Found = Iterator[tuple[str, str, tuple[str, ...]]]


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one state of one rank while it trains, on the device and in host memory."""

    name: str
    device: int
    host: int = 0


@dataclass(frozen=True)
class ShardCounts:
    """Numbers of ranks that share matrices, a pack's tokens, weights, experts and optimizer state."""

    tensor: int
    context: int
    weights: int
    experts: int
    optimizer: int

    def of(self, architecture: ModelSizes) -> int:
        """Return the number of parameters of one rank."""
        dense = architecture.parameters - architecture.expert_parameters
        return -(-dense // self.weights) + -(-architecture.expert_parameters // self.experts)


class Backend(Protocol):
    """Facts and rules of one backend. Every method is pure."""

    # A data-parallel shard, as messages call it.
    shard_name: str
    # True if ranks can be laid out in more ways than one, so that the plan shows the layout.
    has_layouts: bool

    def layout(self, trainer: TrainerSection) -> Layout:
        """Return how the ranks share the work."""
        ...

    def check_keys(self, trainer: TrainerSection) -> Found:
        """Yield what the backend itself lacks, such as its package."""
        ...

    def check_unused(self, trainer: TrainerSection) -> Found:
        """Yield keys of this backend that ask for something while another one trains."""
        ...

    def check_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int | None) -> Found:
        """Yield contradictions of the layout. sizes: None when unknown. sequences: of an update, None when wrong."""
        ...

    def check_model(self, trainer: TrainerSection, sizes: ModelSizes | None) -> Found:
        """Yield what of the model the backend has no layers for."""
        ...

    def check_optimizer(self, trainer: TrainerSection, sizes: ModelSizes | None) -> Found:
        """Yield contradictions of where the optimizer runs."""
        ...

    def idle_keys(self, trainer: TrainerSection) -> dict[str, str]:
        """Return keys that are set and change nothing, with the reason."""
        ...

    def suggest_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int) -> str:
        """Return the overrides of the nearest layout that `sequences` an update can feed, as `; try ...`, or ''."""
        ...

    def shard_counts(self, trainer: TrainerSection) -> ShardCounts:
        """Return among how many ranks each state is shared."""
        ...

    def states(self, trainer: TrainerSection, architecture: ModelSizes, size: int) -> dict[State, StateBytes]:
        """Return the bytes of one rank's states. size: bytes of one number of the compute dtype."""
        ...

    def optimizer_on_host(self, trainer: TrainerSection) -> bool:
        """Return True if optimizer state lives on the host and is updated there; it then never moves."""
        ...

    def residual_bytes(self, trainer: TrainerSection, size: int) -> int:
        """Return the bytes of one number of the residual that layers add to."""
        ...

    def gathers_layers(self, trainer: TrainerSection, size: int) -> bool:
        """Return True if a rank gathers whole layers while it works on them."""
        ...

    def more_room(self, trainer: TrainerSection, peak: int, capacity: int) -> str:
        """Return advice for states of `peak` bytes a device that holds `capacity`."""
        ...


def backend_of(trainer: TrainerSection) -> Backend:
    """Return the backend that `trainer.backend` names."""
    return _load(trainer.backend)


def layout_of(trainer: TrainerSection) -> Layout:
    """Return how the trainer's ranks share the work."""
    return backend_of(trainer).layout(trainer)


def other_backends(trainer: TrainerSection) -> list[Backend]:
    """Return the backends that do not train."""
    folder = importlib.import_module("rlctl.preflight.backends").__path__
    return [_load(module.name) for module in pkgutil.iter_modules(folder) if module.name != trainer.backend]


def _load(name: str) -> Backend:
    backend: Backend = importlib.import_module(f"rlctl.preflight.backends.{name}").BACKEND
    return backend
