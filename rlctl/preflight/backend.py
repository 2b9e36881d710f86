"""Interface of a training backend before anything starts: layout rules, memory facts, checks. No torch.

A backend NAME is two things: `BACKEND` in `preflight/backends/NAME.py`, a `Backend`, and `TRAINER` in
`training/NAME/trainer.py`. Nothing else knows a backend by name.
"""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rlctl.config.errors import BrokenValueError
from rlctl.config.trainer_schema import TrainerSection
from rlctl.models.facts import ModelSizes
from rlctl.preflight.parallel_layout import Layout
from rlctl.preflight.trainer_settings import TrainerSettings

FLOAT32 = 4
State = Literal["parameters", "gradients", "optimizer"]
STATES: tuple[State, ...] = ("parameters", "gradients", "optimizer")


class Violation(NamedTuple):
    """One contradiction that a check found."""

    key: str
    message: str
    # Keys that `key` contradicts.
    others: tuple[str, ...] = ()
    # Place outside the config, such as a line of a data file; empty: where `key` or one of `others` was written.
    where: str = ""


Violations = Iterator[Violation]


def unbroken(violations: Violations) -> Violations:
    """Yield the violations of a check up to a value that is broken."""
    with suppress(BrokenValueError):
        yield from violations


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

    def rank_parameters(self, sizes: ModelSizes) -> int:
        """Return the number of parameters of one rank."""
        dense = sizes.parameters - sizes.expert_parameters
        return -(-dense // self.weights) + -(-sizes.expert_parameters // self.experts)


class Backend(ABC):
    """Facts and rules of one backend. Every method is pure. Checks find nothing unless a backend has something."""

    # A data-parallel shard, as messages call it.
    shard_name: str
    # True if ranks can be laid out in more ways than one, so that the plan shows the layout.
    has_layouts: bool
    # True if it trains low-rank adapters (`lora`).
    trains_adapters = False
    # True if a backward pass allocates the gradients, and an update frees them.
    frees_gradients = False

    @abstractmethod
    def layout(self, trainer: TrainerSection) -> Layout:
        """Return how the ranks share the work."""

    def ranks_a_copy(self, trainer: TrainerSection) -> int:
        """Return the number of ranks that hold one copy of all weights. The ranks of a copy are consecutive."""
        return trainer.num_ranks

    def check_keys(self, trainer: TrainerSection) -> Violations:
        """Yield the missing parts of the backend itself, such as its package."""
        yield from ()

    def check_unused(self, trainer: TrainerSection) -> Violations:
        """Yield keys of this backend that ask for something while another one trains."""
        yield from ()

    def check_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int | None) -> Violations:
        """Yield contradictions of the layout. sizes: None when unknown. sequences: of an update, None when wrong."""
        yield from ()

    def check_model(self, trainer: TrainerSection, sizes: ModelSizes | None) -> Violations:
        """Yield parts of the model that the backend has no layers for."""
        yield from ()

    def check_optimizer(self, trainer: TrainerSection, sizes: ModelSizes | None) -> Violations:
        """Yield contradictions of where the optimizer runs."""
        yield from ()

    def idle_keys(self, trainer: TrainerSection) -> dict[str, str]:
        """Return keys that are set and change nothing, with the reason."""
        return {}

    def suggest_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int) -> str:
        """Return the overrides of the nearest layout that `sequences` an update can feed, as `; try ...`, or ''."""
        return ""

    def choose_replicas(
        self, trainer: TrainerSection, nodes: tuple[int, ...], sizes: ModelSizes | None, memory: int | None, size: int
    ) -> tuple[int, str]:
        """Return the copies of weights and optimizer state, and the reason.

        nodes: ranks of each of several nodes. memory: bytes of a device; None where it bounds nothing. size: as in
        `states`.
        """
        return 1, "copies follow from the layout"

    @abstractmethod
    def shard_counts(self, trainer: TrainerSection) -> ShardCounts:
        """Return among how many ranks each state is shared."""

    @abstractmethod
    def states(self, trainer: TrainerSection, sizes: ModelSizes, size: int) -> dict[State, StateBytes]:
        """Return the bytes of one rank's states. size: bytes of one number of the compute dtype."""

    def optimizer_on_host(self, trainer: TrainerSection) -> bool:
        """Return True if optimizer state lives on the host and is updated there; it then never moves."""
        return False

    def residual_bytes(self, trainer: TrainerSection, size: int) -> int:
        """Return the bytes of one number of the residual that layers add to. size: as in `states`."""
        return size

    @abstractmethod
    def copied_weights(self, trainer: TrainerSettings, sizes: ModelSizes, size: int) -> int:
        """Return the number of weights that a rank holds once more to compute with. size: as in `states`."""

    @abstractmethod
    def more_room(self, trainer: TrainerSection, peak: int, capacity: int) -> str:
        """Return advice for states of `peak` bytes a device that holds `capacity`."""


def backend_of(trainer: TrainerSection) -> Backend:
    """Return the backend that `trainer.backend` names."""
    return _load_backend(trainer.backend)


def layout_of(trainer: TrainerSection) -> Layout:
    """Return how the trainer's ranks share the work."""
    return backend_of(trainer).layout(trainer)


def other_backends(trainer: TrainerSection) -> list[Backend]:
    """Return the backends that do not train."""
    folder = importlib.import_module("rlctl.preflight.backends").__path__
    return [_load_backend(module.name) for module in pkgutil.iter_modules(folder) if module.name != trainer.backend]


def _load_backend(name: str) -> Backend:
    backend: Backend = importlib.import_module(f"rlctl.preflight.backends.{name}").BACKEND
    return backend
