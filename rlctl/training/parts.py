"""An update made in several parts, before all of its sequences are known, whatever trains it."""

from collections.abc import Iterable

from torch import Tensor

from rlctl.training.interface import Loss, Totals
from rlctl.training.metric_accumulator import MetricAccumulator


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
