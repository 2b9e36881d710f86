"""Arithmetic of one update, for every backend: learning rate, metrics, and division and clipping of the gradients."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlctl.config.trainer_schema import OptimizerSection
from rlctl.training.interface import LossOutput
from rlctl.utils.device_stream import Span, total_seconds


def learning_rate(update: int, section: OptimizerSection, total_updates: int) -> float:
    """Return the learning rate of update number `update`, counted from 0.

    The rate rises linearly over `warmup_steps` updates, and the last warm-up update has the rate `lr`. After the
    warm-up the rate is constant, or falls linearly or as half a cosine. It would reach `min_lr_ratio * lr` at update
    number `total_updates`, one after the last.
    """
    if update < section.warmup_steps:
        return section.lr * (update + 1) / section.warmup_steps
    progress = min(1.0, (update - section.warmup_steps) / max(1, total_updates - section.warmup_steps))
    factors = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return section.lr * (section.min_lr_ratio + (1 - section.min_lr_ratio) * factors[section.schedule])


# Matches names of norm weights and biases, as transformers does (`Trainer.get_decay_parameter_names`).
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.|_)norm(\.|$)")


def decayed_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters to which weight decay applies: all matrices except norm weights and biases.

    transformers' Trainer decays the same matrices, and also attention sinks, decay rates of state-space layers and some
    norms.
    """
    names = set()
    for path, module in model.named_modules():
        if "norm" in type(module).__name__.lower():
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.ndim > 1 and not _UNDECAYED.search(name.lower()):
                names.add(name)
    return names


# Metrics before the division: name -> (sum, weight) of means, and name -> largest value of maxima.
Sums = tuple[dict[str, tuple[float, float]], dict[str, float]]


class MetricAccumulator:
    """Collects the LossOutput of every micro-batch of one update, and computes the update's metrics.

    The outputs stay on the device, and `join` reads all of the numbers in one transfer.
    """

    def __init__(self) -> None:
        self._outputs: list[LossOutput] = []
        # Metric's name -> spans of device work that ended before the last output was added.
        self._spans: defaultdict[str, list[Span]] = defaultdict(list)

    def add(self, output: LossOutput) -> None:
        """Add the output of one micro-batch, after its backward pass."""
        self._outputs.append(LossOutput(output.loss.detach(), output.means, output.maxima))

    def add_span(self, name: str, span: Span) -> None:
        """Add a span of device work to the metric `name`: the seconds of all its spans, on the slowest rank."""
        self._spans[name].append(span)

    def loss(self, device: torch.device) -> Tensor:
        """Return the sum of this rank's losses, float64 [] on `device`; 0 if no output was added."""
        if not self._outputs:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([output.loss for output in self._outputs]).double().sum()

    def join(self) -> dict[str, float]:
        """Return every metric by name, over all ranks. All ranks call together.

        Ranks may have different names, because a rank without sequences has none.
        """
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
        # The numbers above were read from the device, which has therefore reached the end of each span.
        parts.append(({}, {name: total_seconds(spans) for name, spans in self._spans.items()}))
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


# Number of elements that are summed in float32. The sums of these rows are added in float64.
_ROW = 4096


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, float64 [] on their device; 0 on the CPU for an empty list.

    On a CPU the squared norms of rows of 4096 elements are added in float64. torch's float32 sum is too small there: by
    1% for 1e8 elements, by 0.1% for 2e7.
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
    """Return the gradient norm after the division by `normalizer`, and the factor for all gradients.

    The factor divides the gradients by `normalizer` and clips them to norm `max_norm`. norm: 2-norm of the summed
    gradients over all ranks. loss: sum over all ranks. Raises FloatingPointError on all ranks if norm or loss is not
    finite. named_gradients: this rank's gradients, read only to name in the error those that are not finite.
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
    """Divide the gradients by `normalizer` and clip them to norm `max_norm`, in place and in one pass over memory.

    Return the norm after the division and before clipping. norm, loss, named_gradients: see `clipping`. Raises
    FloatingPointError for a loss or norm that is not finite, and then changes no gradient.
    """
    norm, factor = clipping(named_gradients, norm, loss, normalizer, max_norm)
    if gradients:
        torch._foreach_mul_(gradients, factor)
    return norm
