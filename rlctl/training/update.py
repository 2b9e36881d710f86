"""The arithmetic of one update, the same for every backend: its learning rate, its metrics, its one division."""

import math
import re
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlctl.config.trainer_schema import OptimizerSection
from rlctl.training.interface import LossOutput


def learning_rate(update: int, section: OptimizerSection, total_updates: int) -> float:
    """Return the learning rate of update number `update`, counted from 0.

    The rate rises linearly over `warmup_steps` updates, and reaches `lr` with the last one. Then it is constant, or
    falls along a line or half a cosine to `min_lr_ratio * lr`, which update `total_updates` would have.
    """
    if update < section.warmup_steps:
        return section.lr * (update + 1) / section.warmup_steps
    progress = min(1.0, (update - section.warmup_steps) / max(1, total_updates - section.warmup_steps))
    factors = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return section.lr * (section.min_lr_ratio + (1 - section.min_lr_ratio) * factors[section.schedule])


# Names of norms' weights and of biases, by transformers (`Trainer.get_decay_parameter_names`).
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.|_)norm(\.|$)")


def decayed_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that weight decay reaches: matrices that are neither a norm's nor a bias.

    transformers' own grouping has the same matrices. It decays sinks, decays of states and some norms too.
    """
    names = set()
    for path, module in model.named_modules():
        if "norm" in type(module).__name__.lower():
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.ndim > 1 and not _UNDECAYED.search(name.lower()):
                names.add(name)
    return names


# name -> (sum, weight), and name -> largest value.
Sums = tuple[dict[str, tuple[float, float]], dict[str, float]]


class MetricAccumulator:
    """The micro-batches' LossOutputs of one update. They stay on the device until all are read in one transfer."""

    def __init__(self) -> None:
        self._outputs: list[LossOutput] = []

    def add(self, output: LossOutput) -> None:
        """Take the output of one micro-batch, after its backward pass."""
        self._outputs.append(LossOutput(output.loss.detach(), output.means, output.maxima))

    def loss(self, device: torch.device) -> Tensor:
        """Return this rank's summed loss, float64 on `device`; 0 if the rank counts none."""
        if not self._outputs:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([output.loss for output in self._outputs]).double().sum()

    def join(self) -> dict[str, float]:
        """Return every metric over all ranks; a rank without sequences may know fewer names."""
        tensors: list[Tensor] = []
        for output in self._outputs:
            for total_and_weight in output.means.values():
                tensors += total_and_weight
            tensors += output.maxima.values()
        numbers = iter(torch.stack(tensors).tolist() if tensors else ())
        parts: list[Sums] = []
        for output in self._outputs:
            means = {name: (next(numbers), next(numbers)) for name in output.means}
            parts.append((means, {name: next(numbers) for name in output.maxima}))
        rank_sums = _merge_sums(parts)
        sums_of_ranks = [rank_sums] * dist.get_world_size()
        if len(sums_of_ranks) > 1:
            dist.all_gather_object(sums_of_ranks, rank_sums)
        sums, maxima = _merge_sums(sums_of_ranks)
        return {name: total / weight for name, (total, weight) in sums.items() if weight} | maxima


def _merge_sums(parts: list[Sums]) -> Sums:
    sums: dict[str, tuple[float, float]] = {}
    maxima: dict[str, float] = {}
    for means, part_maxima in parts:
        for name, (part_total, part_weight) in means.items():
            total, weight = sums.get(name, (0.0, 0.0))
            sums[name] = total + part_total, weight + part_weight
        for name, largest in part_maxima.items():
            maxima[name] = max(maxima.get(name, largest), largest)
    return sums, maxima


# Elements that are added up in float32 at a time.
_ROW = 4096


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, float64 [], on their device (of none on the CPU).

    On a CPU rows of 4096 elements are added up in float64: torch's own float32 sum is 1% too small at 1e8 elements, and
    1e-3 at 2e7.
    """
    if gradients and gradients[0].device.type != "cpu":
        return torch.nn.utils.get_total_norm(gradients).double()
    square = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        flat = gradient.reshape(-1)
        even = flat.numel() // _ROW * _ROW
        square += torch.linalg.vector_norm(flat[:even].view(-1, _ROW), dim=1).double().square().sum()
        square += flat[even:].double().square().sum()
    return square.sqrt()


def clipping(
    named_gradients: Iterable[tuple[str, Tensor]], norm: float, loss: float, normalizer: float, max_norm: float
) -> tuple[float, float]:
    """Return the gradients' norm after a division by `normalizer`, and the factor that divides and clips to `max_norm`.

    named_gradients: this rank's, read only to name those that are not finite. norm: 2-norm of the summed gradients;
    loss: the summed loss; both over all ranks, so that all ranks raise or none. Raises FloatingPointError unless both
    are finite.
    """
    problems = []
    if not math.isfinite(loss):
        problems.append(f"the loss is {loss}")
    if not math.isfinite(norm):
        is_finite = {name: bool(gradient.isfinite().all()) for name, gradient in named_gradients}
        bad = [name for name in is_finite if not is_finite[name]]
        place = f"first in {bad[0]}, {len(bad)} of {len(is_finite)} tensors" if bad else "on another rank"
        problems.append(f"the gradient norm is {norm} ({place})")
    if problems:
        raise FloatingPointError(f"{' and '.join(problems)}; the weights were left as they were")
    norm /= normalizer
    return norm, min(1.0, max_norm / (norm + 1e-6)) / normalizer


def divide_and_clip(
    gradients: list[Tensor],
    named_gradients: Iterable[tuple[str, Tensor]],
    norm: float,
    loss: float,
    normalizer: float,
    max_norm: float,
) -> float:
    """Divide and clip the gradients in one pass, see `clipping`; return their norm between the two.

    Raises FloatingPointError, with nothing changed.
    """
    norm, factor = clipping(named_gradients, norm, loss, normalizer, max_norm)
    if gradients:
        torch._foreach_mul_(gradients, factor)
    return norm
