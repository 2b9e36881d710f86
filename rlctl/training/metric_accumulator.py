"""Metrics of one update: summed over micro-batches on the device, read once, joined over ranks once."""

from collections.abc import Callable
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.training.interface import LossOutput


class MetricAccumulator:
    """Sums and maxima of the micro-batches' LossOutputs; `join` makes them equal on every rank."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._loss: Tensor | None = None

    def add(self, output: LossOutput) -> None:
        loss = output.loss.detach().double()
        self._loss = loss if self._loss is None else self._loss + loss
        for name, value in output.sums.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in output.maxima.items():
            value = value.detach().double()
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def scale(self, factor: Callable[[str], float]) -> None:
        """Multiply every sum so far by the factor of its name."""
        self._sums = {name: value * factor(name) for name, value in self._sums.items()}
        self._loss = None if self._loss is None else self._loss * factor("loss")

    def loss(self, device: torch.device) -> Tensor:
        """Return this rank's share of the loss, float64 on `device`; of a rank that counts none, 0."""
        return torch.zeros((), dtype=torch.float64, device=device) if self._loss is None else self._loss

    def join(self) -> dict[str, float]:
        """Over all ranks: sums added, maxima's maximum. A rank without sequences may know fewer names."""
        own = _read(self._sums), _read(self._maxima)
        ranks: list[tuple[dict[str, float], dict[str, float]]] = [own] * dist.get_world_size()
        if len(ranks) > 1:
            dist.all_gather_object(ranks, own)
        joined: dict[str, float] = {}
        for sums, _ in ranks:
            for name, value in sums.items():
                joined[name] = joined.get(name, 0.0) + value
        for _, maxima in ranks:
            for name, value in maxima.items():
                joined[name] = max(joined.get(name, value), value)
        return joined


def check_finite(loss: float, norm: float, where: Callable[[], str]) -> None:
    """Raise FloatingPointError unless the loss and the gradient norm of an update are finite.

    Both are over all ranks, so that all of them raise, before anything is updated. where: names the worst gradients.
    """
    if isfinite(loss) and isfinite(norm):
        return
    wrong = [] if isfinite(loss) else [f"the loss is {loss}"]
    if not isfinite(norm):
        wrong.append(f"the gradient norm is {norm} ({where()})")
    raise FloatingPointError(f"{' and '.join(wrong)}; the weights were left as they were")


def _read(values: dict[str, Tensor]) -> dict[str, float]:
    """One transfer from the device for all of them."""
    return dict(zip(values, torch.stack(list(values.values())).tolist())) if values else {}
