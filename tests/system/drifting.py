"""Source of weights that change with every version, for tests of refits."""

from pathlib import Path

import torch
from torch import Tensor

from rlctl.refit.protocol import Header, SendReport
from tests.system.engines import FolderSource


def drift_weights(tensors: dict[str, Tensor], version: int) -> dict[str, Tensor]:
    """Return the weights of a version: the weights of version 0 plus a random step, seeded by the version."""
    random = torch.Generator().manual_seed(version)
    scale = 0.05 if version > 0 else 0.0
    steps = {name: torch.randn(tensor.shape, generator=random) for name, tensor in tensors.items()}
    return {name: tensor + scale * tensor.std() * steps[name] for name, tensor in tensors.items()}


class DriftingSource(FolderSource):
    """Stand-in for a trainer rank: sends the weights of any requested version."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._first = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def refit_send(self, header: Header) -> SendReport:
        for name, tensor in drift_weights(self._first, header.version).items():
            self.tensors[name].copy_(tensor)
        return super().refit_send(header)
