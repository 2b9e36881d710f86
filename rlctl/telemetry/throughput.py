"""Three throughputs, each with its denominator, and MFU with its formula (contract 9). Pure functions.

`times` are the seconds of one step by name, as `StepClock.finish` returns them. Token counts are of the same step. A
throughput is 0.0 if no time passed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rlctl.telemetry.clock import GENERATION_SECONDS, STEP_SECONDS, TRAIN_SECONDS, productive_seconds
from rlctl.telemetry.metrics import GROUPS, IN_ASYNC, IN_GRPO, SPEED, Metric, PanelRow, ReportChart, rows_where

_RATES = ReportChart(SPEED, "Throughput, tokens/s/device", 10)
_GENERATION = ReportChart(SPEED, "Generation, tokens/s/device", 20)
IDLE = ReportChart(SPEED, "Idle", 40)
_USE = ReportChart(SPEED, "Devices in use", 51)
_TOKENS = ReportChart(GROUPS, "Tokens of a step", 12)
# ruff must not split the rows of this table over more lines.
# fmt: off
TRAINED_TOKENS = Metric("tokens/trained", "tokens that went through the update", chart=_TOKENS,
    panel=[PanelRow("tokens", 270, algorithm="sft")])
EFFECTIVE = Metric("throughput/effective", "end to end, trained tokens/s/device", chart=_RATES)
TRAINING = Metric("throughput/training", "training only, tokens/s/device", chart=_RATES)
GENERATION = Metric("throughput/generation", "generation only, tokens/s/device", chart=_GENERATION)
MFU = Metric("throughput/mfu",
    "model FLOPs utilisation while training, share; of a frozen weight 4 FLOPs a token count", "share", chart=_USE)
MFU_6N = Metric("throughput/mfu_6n",
    "the same with 6 FLOPs for each weight, as if none were frozen; only with adapters", "share")
TRAINER_IDLE = Metric("idle/trainer", "share of the step in which the trainer did nothing", "share", chart=IDLE)
GENERATOR_IDLE = Metric("idle/generator", "share of the step in which the generator did nothing", "share", chart=IDLE)
GENERATOR_IN_REFIT = Metric("idle/generator_refit",
    "share of the step in which a refit kept the generator from sampling", "share", chart=IDLE, when=IN_ASYNC)
METRICS = (
    TRAINED_TOKENS, EFFECTIVE, TRAINING, MFU, MFU_6N, TRAINER_IDLE,
    *rows_where(IN_GRPO, GENERATION, GENERATOR_IDLE),
    GENERATOR_IN_REFIT,
)
# fmt: on

# Peak dense bf16 FLOP/s of the SXM module, from the vendor's data sheet (without sparsity).
PEAK_FLOPS = {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12, "B200": 2250e12}
# Words in a device's name that mean a lower peak: slower cards, and MIG slices. The A100's PCIe card has the peak of
# its SXM module.
_LESSER = {name: {"PCIE", "NVL", "MIG"} for name in PEAK_FLOPS} | {"A100": {"MIG"}}


def effective(trained_tokens: int, times: Mapping[str, float], devices: int) -> float:
    """Return the end-to-end throughput, tokens/s/device.

    Tokens that went through the update, prompts included, divided by the step's wall time without validation and
    checkpoint, divided by ALL distinct devices, trainer's and generator's. Tokens that were sampled and not trained
    are not counted, but the time to sample them is.
    """
    return _rate(trained_tokens, productive_seconds(dict(times)), devices)


def training_only(trained_tokens: int, times: Mapping[str, float], devices: int) -> float:
    """Return the throughput of training alone, tokens/s/device.

    Tokens that went through the update, divided by `time/train`, divided by the trainer's devices. Log-prob passes,
    waiting and refit are not in that time.
    """
    return _rate(trained_tokens, times.get(TRAIN_SECONDS.name, 0.0), devices)


def generation_only(generated_tokens: int, times: Mapping[str, float], devices: int) -> float:
    """Return the throughput of generation alone, tokens/s/device.

    Generated tokens (no prompts), trained or not, divided by `time/generation`, divided by the generator's devices.
    """
    return _rate(generated_tokens, times.get(GENERATION_SECONDS.name, 0.0), devices)


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs to train on one token: 6 N for the weights, and 12 H min(T, W) for each attention layer over T tokens.

    Source: PaLM, appendix B (arXiv 2204.02311). Recomputed activations do not count. A frozen weight costs 4 instead of
    6: the forward pass, and the gradient of its input. An adapter's weights cost 6.
    """

    # N: parameters that a token passes through. Of a mixture of experts only the active ones count.
    parameters: int
    # (H, W) of each attention layer: heads times head size, and the sliding window in tokens (None: no window).
    attention: tuple[tuple[float, int | None], ...]
    # Parameters of the adapters; 0 without adapters. With adapters the N parameters of the model are frozen.
    adapters: int = 0

    def per_token(self, length: float) -> float:
        """Return the FLOPs to train on one token of a sequence of `length` tokens."""
        flops_per_weight = 4.0 if self.adapters else 6.0
        return flops_per_weight * self.parameters + 6.0 * self.adapters + self._attention(length)

    def full_per_token(self, length: float) -> float:
        """Return the FLOPs of `per_token` as if no weight were frozen."""
        return 6.0 * (self.parameters + self.adapters) + self._attention(length)

    def metrics(self, training: float, length: float, device: str) -> dict[str, float]:
        """Return throughput/mfu, and with adapters also throughput/mfu_6n (from `full_per_token`).

        The result is empty for a device whose peak is not known. training: tokens/s/device. length: tokens.
        """
        share = mfu(training, self.per_token(length), device)
        full_share = mfu(training, self.full_per_token(length), device)
        if share is None or full_share is None:
            return {}
        return {MFU.name: share} | ({MFU_6N.name: full_share} if self.adapters else {})

    def _attention(self, length: float) -> float:
        return sum(12.0 * width * min(length, window or length) for width, window in self.attention)


def length_of_a_token(lengths: Sequence[int]) -> float:
    """Return the mean sequence length as a token sees it: each sequence is weighted by its number of tokens.

    The cost of attention grows with the square of a sequence's length, so the plain mean over sequences would count
    long sequences too little.
    """
    return sum(length * length for length in lengths) / max(1, sum(lengths))


def mfu(training: float, flops: float, device: str) -> float | None:
    """Return the model FLOPs utilisation of the trainer, 0 to 1; None if the device's peak is not known, as on a CPU.

    It is `training` (tokens/s/device of `training_only`) times `flops` (of one token), divided by the bf16 peak.
    """
    peak = peak_flops(device)
    return None if peak is None else training * flops / peak


def peak_flops(device: str) -> float | None:
    """Return the bf16 peak, FLOP/s, of a device such as "NVIDIA H100 80GB HBM3"; None if it is not known for certain.

    The peak depends on the form of the chip: a PCIe or NVL card is slower than an SXM module, and a MIG slice is a part
    of a module. A wrong MFU is worse than none.
    """
    words = set(re.findall(r"[A-Z0-9]+", device.upper()))
    return next((peak for name, peak in PEAK_FLOPS.items() if name in words and not words & _LESSER[name]), None)


def idle_share(times: Mapping[str, float], busy: Iterable[str]) -> float:
    """Return the share (0 to 1) of the step, without validation and checkpoint, in which one side was idle.

    The side is the trainer or the generator. busy: the phases in which it works, for example ("train", "log_probs",
    "refit") for the trainer.
    """
    wall = productive_seconds(dict(times))
    worked = sum(times.get(f"time/{name}", 0.0) for name in busy)
    return min(1.0, max(0.0, 1.0 - worked / wall)) if wall > 0 else 0.0


def _rate(tokens: int, seconds: float, devices: int) -> float:
    return tokens / seconds / devices if seconds > 0 and devices > 0 else 0.0


def split(steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return (phase, share of all steps' wall time), largest first, from step records with `time/*`."""
    wall = sum(float(record.get(STEP_SECONDS.name, 0.0)) for record in steps)
    phases = {name for name in chain.from_iterable(steps) if name.startswith("time/")} - {STEP_SECONDS.name}
    sums = {name: sum(float(record.get(name, 0.0)) for record in steps) for name in phases}
    shares = [(name.removeprefix("time/"), seconds / wall if wall > 0 else 0.0) for name, seconds in sums.items()]
    return sorted(shares, key=lambda pair: (-pair[1], pair[0]))
