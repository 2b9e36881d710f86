"""One update, whatever trains it: its learning rate, its metrics, and its parts."""

import math
from collections.abc import Callable, Iterable
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.config.schema import OptimizerSection
from rlctl.training.interface import Loss, LossOutput, Totals


def learning_rate(update: int, section: OptimizerSection, total_updates: int) -> float:
    """Learning rate of update number `update`, counted from 0.

    Linear warm-up over `warmup_steps` updates, reaching `lr` with the last of them; then constant, or down a line
    or a half cosine to `min_lr_ratio * lr`, which update `total_updates` would have, the first not made.
    """
    if update < section.warmup_steps:
        return section.lr * (update + 1) / section.warmup_steps
    done = min(1.0, (update - section.warmup_steps) / max(1, total_updates - section.warmup_steps))
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[section.schedule]
    return section.lr * (section.min_lr_ratio + (1 - section.min_lr_ratio) * left)


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


def carry_on(
    begun: MetricAccumulator | None, gradients: Iterable[Tensor], loss: Loss, before: Totals, now: Totals
) -> MetricAccumulator:
    """What the parts so far left, divided by `before`, comes to be divided by `now`: gradients in place, and metrics.

    begun: the metrics, which are returned. Raises RuntimeError without any, TypeError for a loss that knows no parts
    (see `LossInParts`).
    """
    if begun is None:
        raise RuntimeError("the earlier parts of the update are gone")
    carry = getattr(loss, "carry", None)
    if carry is None:
        raise TypeError(f"{type(loss).__name__} has no `carry`: its update cannot be made in parts")
    begun.scale(lambda name: float(carry(name, before, now)))
    factor = float(carry("loss", before, now))
    for gradient in gradients:
        gradient.mul_(factor)
    return begun


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
