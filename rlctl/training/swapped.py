"""Roles whose weights replace the policy's for a pass: a whole model, adapters, or the base with adapters off."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch import Tensor, nn

from rlctl.config.run_weights import is_adapter
from rlctl.preflight.declared_columns import Role, RoleModel
from rlctl.training.lora import without_adapters
from rlctl.training.offload import FrozenWeights

# Name -> this rank's part of a weight.
Weights = dict[str, Tensor]


class SwappedRoles:
    """Frozen weights of swapped roles, on the host. Each is read from its folder at its first use."""

    def __init__(
        self,
        lm: nn.Module,
        models: Mapping[Role, RoleModel],
        base: str | None,
        live: Callable[[bool], Weights],
        read: Callable[[Path, Weights], Weights],
    ) -> None:
        """base: folder of the frozen weights below adapters; None: all weights are trained.

        live: returns the policy's weights in their own memory; with True those below its adapters. read: reads a folder
        onto the host, cut and named as the live weights.
        """
        self._lm = lm
        self._models = models
        self._base = base
        self._live = live
        self._read = read
        self._frozen: dict[Role, FrozenWeights] = {}

    def in_place(self, role: Role) -> AbstractContextManager[None]:
        """Put the weights of `role` in place of the live ones for a block. Raises ValueError for an unknown role."""
        if role not in self._models:
            raise ValueError(f"the trainer has no {role}: its roles are {', '.join(('policy', *self._models))}")
        folder = self._models[role].folder
        if folder == self._base:
            return without_adapters(self._lm)
        is_below = self._base is not None and not is_adapter(Path(folder))
        live = self._live(is_below)
        if role not in self._frozen:
            self._frozen[role] = FrozenWeights(self._read(Path(folder), live))
        swapped = self._frozen[role].in_place_of(live)
        # A whole model computes with the policy's adapters off.
        return _both(swapped, without_adapters(self._lm)) if is_below else swapped


@contextmanager
def _both(first: AbstractContextManager[None], second: AbstractContextManager[None]) -> Iterator[None]:
    with first, second:
        yield
