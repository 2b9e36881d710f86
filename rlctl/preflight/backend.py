"""Interface of a training backend before a run starts: layout rules, memory facts, checks. It imports no torch.

A backend called NAME has two objects: `BACKEND`, a `Backend`, in `preflight/backends/NAME.py`, and `TRAINER` in
`training/NAME/trainer.py`. No other module names a backend.
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
    # Location outside the config, for example a line of a data file. Empty: the error names the line where `key` or one
    # of `others` was written.
    where: str = ""


Violations = Iterator[Violation]


def unbroken(violations: Violations) -> Violations:
    """Yield the violations of a check. A check that reads a `BROKEN` value ends there, without an error."""
    with suppress(BrokenValueError):
        yield from violations


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank's parameters, gradients or optimizer state during training, on device and host."""

    name: str
    device: int
    host: int = 0


@dataclass(frozen=True)
class ShardCounts:
    """Numbers of ranks among which a backend splits each matrix, each pack's tokens, weights, experts and optimizer
    state.
    """

    tensor: int
    context: int
    weights: int
    experts: int
    optimizer: int

    def rank_parameters(self, sizes: ModelSizes) -> int:
        """Return the number of parameters that one rank holds."""
        dense = sizes.parameters - sizes.expert_parameters
        return -(-dense // self.weights) + -(-sizes.expert_parameters // self.experts)


class Backend(ABC):
    """Facts and rules of one training backend. Every method is pure. A check finds nothing unless a backend overrides
    it.
    """

    # Word for a data-parallel shard in messages, for example `rank`.
    shard_name: str
    # True if the ranks have several possible layouts. The plan then shows the layout.
    has_layouts: bool
    # True if the backend trains low-rank adapters (`lora`).
    trains_adapters = False
    # True if ranks hold further models besides the policy (place resident).
    holds_residents = False
    # True if ranks compute divergences from a teacher's hidden states (grpo.loss.distillation.over).
    measures_divergences = False
    # True if a backward pass allocates the gradients, and an update frees them.
    frees_gradients = False

    @abstractmethod
    def layout(self, trainer: TrainerSection) -> Layout:
        """Return the sizes of the trainer's parallel groups."""

    def ranks_a_copy(self, trainer: TrainerSection) -> int:
        """Return the number of ranks that together hold one full copy of the weights. Their rank numbers are
        consecutive.
        """
        return trainer.num_ranks

    def check_keys(self, trainer: TrainerSection) -> Violations:
        """Yield problems of the backend itself, for example a package that is not installed."""
        yield from ()

    def check_unused(self, trainer: TrainerSection) -> Violations:
        """Yield keys of this backend that are set although another backend trains."""
        yield from ()

    def check_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int | None) -> Violations:
        """Yield contradictions of the layout.

        sizes: of the model; None when unknown. sequences: number in an update; None when the config's value is wrong.
        """
        yield from ()

    def check_model(self, trainer: TrainerSection, sizes: ModelSizes | None) -> Violations:
        """Yield features of the model that the backend does not implement."""
        yield from ()

    def check_optimizer(self, trainer: TrainerSection, sizes: ModelSizes | None) -> Violations:
        """Yield contradictions between keys that place the optimizer on the host or on the device."""
        yield from ()

    def idle_keys(self, trainer: TrainerSection) -> dict[str, str]:
        """Return dotted key -> reason, of the keys that are set and have no effect."""
        return {}

    def suggest_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int) -> str:
        """Return overrides for the nearest layout that has at most `sequences` shards, as `; try KEY=VALUE`; '' without
        one.
        """
        return ""

    def choose_replicas(
        self, trainer: TrainerSection, nodes: tuple[int, ...], sizes: ModelSizes | None, memory: int | None, size: int
    ) -> tuple[int, str]:
        """Return the number of copies of weights and optimizer state, and the reason as text.

        nodes: number of ranks on each node, at least two nodes. memory: bytes of a device; None: not a bound. size: as
        in `states`.
        """
        return 1, "copies follow from the layout"

    @abstractmethod
    def shard_counts(self, trainer: TrainerSection) -> ShardCounts:
        """Return the numbers of ranks among which each part of the training state is split."""

    @abstractmethod
    def states(self, trainer: TrainerSection, sizes: ModelSizes, size: int) -> dict[State, StateBytes]:
        """Return the bytes of one rank's states. size: bytes of a number in the compute dtype, 2 for bfloat16."""

    def optimizer_on_host(self, trainer: TrainerSection) -> bool:
        """Return True if optimizer state is on the host and the host updates it. The state then never moves."""
        return False

    def residual_bytes(self, trainer: TrainerSection, size: int) -> int:
        """Return the bytes of one number in the residual stream. size: as in `states`."""
        return size

    @abstractmethod
    def copied_weights(self, trainer: TrainerSettings, sizes: ModelSizes, size: int) -> int:
        """Return the number of weights that a rank holds twice: the second copy is gathered or cast. size: as in
        `states`.
        """

    @abstractmethod
    def more_room(self, trainer: TrainerSection, peak: int, capacity: int) -> str:
        """Return advice for a run whose states take `peak` bytes of a device with `capacity` bytes."""


def backend_of(trainer: TrainerSection) -> Backend:
    """Return the backend that `trainer.backend` names."""
    return _load_backend(trainer.backend)


def trainer_module(backend: str) -> str:
    """Return the name of the module with a backend's `TRAINER`."""
    return f"rlctl.training.{backend}.trainer"


def layout_of(trainer: TrainerSection) -> Layout:
    """Return how the trainer's ranks share the work."""
    return backend_of(trainer).layout(trainer)


def other_backends(trainer: TrainerSection) -> list[Backend]:
    """Return all backends but the one that `trainer.backend` names."""
    folder = importlib.import_module("rlctl.preflight.backends").__path__
    return [_load_backend(module.name) for module in pkgutil.iter_modules(folder) if module.name != trainer.backend]


def _load_backend(name: str) -> Backend:
    backend: Backend = importlib.import_module(f"rlctl.preflight.backends.{name}").BACKEND
    return backend
