"""Weights that change with every version, and engine workers: one counts for itself who had how many tokens then, one
forgets its weights."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlctl.generation.vllm.worker import RefitWorker
from rlctl.refit.protocol import Header, SendReport
from tests.system.engines import FolderSource


def drifted(tensors: dict[str, Tensor], version: int) -> dict[str, Tensor]:
    """The weights of a version: version 0's, moved by a step of this version."""
    random = torch.Generator().manual_seed(version)
    steps = {name: torch.randn(tensor.shape, generator=random) for name, tensor in tensors.items()}
    return {name: tensor + 0.05 * (version > 0) * tensor.std() * steps[name] for name, tensor in tensors.items()}


class DriftingSource(FolderSource):
    """Sends the weights of any version that is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._first = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def refit_send(self, header: Header) -> SendReport:
        for name, tensor in drifted(self._first, header.version).items():
            self.tensors[name].copy_(tensor)
        return super().refit_send(header)


class CountingWorker(RefitWorker):
    """Keeps, at every change of weights, the length of each running rollout as vLLM's own model runner has it."""

    model_runner: Any
    _counts: list[dict[str, int]] | None = None

    def rl_commit(self, header: Header) -> None:
        """Note the length of each running rollout, then make the weights live."""
        running = self.model_runner.requests.items()
        self._counts = [*(self._counts or []), {name.rsplit("-", 1)[0]: len(r.output_token_ids) for name, r in running}]
        return super().rl_commit(header)

    def rl_counts(self) -> list[dict[str, int]]:
        """One mapping a commit."""
        return self._counts or []


class ForgettingWorker(RefitWorker):
    """Loses its weights and its keys and values when it is told to, as a GPU's does that sleeps without a copy."""

    def rl_forget(self) -> None:
        for parameter in self.model_runner.get_model().parameters():
            parameter.data.fill_(float("nan"))
        for cache in self.model_runner.kv_caches:
            cache.fill_(1000.0)
