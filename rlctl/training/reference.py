"""The reference policy: the run's first weights in host memory, put in the policy's place while they are needed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Reference:
    """weights: this rank's part of them, by name, in the compute dtype (forward passes round to it anyway)."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = {name: _host(tensor) for name, tensor in weights.items()}

    @contextmanager
    def in_place_of(self, live: dict[str, Tensor]) -> Iterator[None]:
        """Within, `live` holds the reference weights; after, bit by bit what it held before."""
        kept = {name: _host(tensor) for name, tensor in live.items()}
        try:
            for name, tensor in live.items():
                tensor.copy_(self._weights[name], non_blocking=True)
            yield
        finally:
            for name, tensor in live.items():
                tensor.copy_(kept[name], non_blocking=True)


def _host(tensor: Tensor) -> Tensor:
    """A copy in host memory, page-locked where a GPU will read it."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
    return copy.copy_(tensor)
