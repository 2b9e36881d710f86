"""The one Trainer interface: what a backend gives the loops, whatever trains behind it.

A `TrainerRank` is a plain class, one object a process; the ranks of a group are called in lockstep, each with
its own share of the data. Losses come in as picklable callables, so that the algorithms stay out of here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlctl.refit.source import Shard
from rlctl.training.micro_batching import TrainingSample

MicroBatch = list[TrainingSample]


@dataclass(frozen=True)
class Totals:
    """Global normalisers of one update, over all ranks and micro-batches: masked tokens, and sequences."""

    tokens: int
    sequences: int

    def __add__(self, more: "Totals") -> "Totals":
        """Of several parts together."""
        return Totals(self.tokens + more.tokens, self.sequences + more.sequences)


@dataclass
class TokenBatch:
    """What a loss sees of one packed micro-batch of T tokens and S sequences (all tensors on the device).

    log_probs: float32 [T], with gradient, of the tempered policy. entropy: float32 [T], with gradient. Both are 0
    where the mask is false: nothing is computed there. mask: bool [T]. fields: name -> float32 [T].
    sequence: int64 [T], index of the token's sequence within the micro-batch. num_sequences: S.
    """

    log_probs: Tensor
    entropy: Tensor
    mask: Tensor
    fields: dict[str, Tensor]
    sequence: Tensor
    num_sequences: int


@dataclass
class LossOutput:
    """loss: scalar with gradient, already divided by the global totals. sums and maxima: scalar metrics.

    Sums are divided by the global totals too, so adding them over micro-batches and ranks gives the mean.
    """

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


class Loss(Protocol):
    """A picklable loss: a frozen dataclass with `__call__`. Its value must not depend on how data was packed."""

    def __call__(self, batch: TokenBatch, totals: Totals) -> LossOutput: ...


class LossInParts(Loss, Protocol):
    """A loss whose update may be made of several parts, before all of its sequences are known."""

    def carry(self, name: str, before: Totals, now: Totals) -> float:
        """The factor from what is divided by `before` to what is divided by `now`. name: of a sum, or "loss" of the
        loss itself, and so of its gradient."""
        ...


class TrainerRank(Protocol):
    """One rank of the trainer group. Every method is called on all ranks together (collectives inside)."""

    def log_probs(self, micro_batches: list[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Log-probs float32 [T] of every sequence, in the order given; no gradient, no state changed."""

    def reference_log_probs(self, micro_batches: list[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """The same under the reference policy (the weights at the start of the run, version 0)."""

    def train(
        self, micro_batches: list[MicroBatch], loss: Loss, totals: Totals, before: Totals | None = None
    ) -> dict[str, float]:
        """One optimizer update over all ranks' micro-batches; returns metrics that are equal on every rank.

        before: the totals of the parts that `accumulate` took; `totals` are then of those and this part together, and
        the loss is a `LossInParts`.

        Raises FloatingPointError, on every rank and with nothing updated, for a loss or a gradient norm that is not
        finite.
        """

    def accumulate(
        self, micro_batches: list[MicroBatch], loss: LossInParts, totals: Totals, before: Totals | None
    ) -> None:
        """The gradients of a part of the next update, see `train`, which ends it. Until then nothing but `accumulate`
        and what a refit asks for may be called."""

    def warm_up(self, micro_batches: list[MicroBatch], loss: Loss, totals: Totals) -> None:
        """What `train` does, but for the update: weights, optimizer and generators of random numbers stay as they are,
        to the last bit, and what is compiled, cached or allocated at first use is there."""

    def evaluate(self, micro_batches: list[MicroBatch], loss: Loss, totals: Totals) -> dict[str, float]:
        """The loss's metrics without an update."""

    def layout(self, dtype: str | None = None) -> list[tuple[str, tuple[int, ...], str]]:
        """(Hugging Face name, shape, dtype) of everything `export` yields, in its order; no data moved."""

    def shards(self) -> list[Shard]:
        """This rank's part of the weights under Hugging Face names: its own memory, no copy, no collective."""

    def export(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face checkpoint names, one alive at a time; on every rank, in lockstep.

        dtype: cast to this ("bfloat16", "float32"); None keeps the master weights' own.
        """

    def save(self, folder: Path) -> None:
        """Weights, optimizer, schedule and RNG into `folder`, loadable on any number of ranks."""

    def load(self, folder: Path) -> None:
        """What `save` wrote."""

    def export_folder(self, folder: Path, dtype: str | None = None) -> None:
        """A Hugging Face folder (config.json, tokenizer, model.safetensors) that transformers and vLLM load."""

    def rest(self) -> None:
        """Give device memory to the engines that share the device: what is cached but not in use, and what the table of
        `config.residency` has on the host while they generate."""

    def memory(self) -> dict[str, float]:
        """Bytes now and at peak: device_allocated, device_peak, host_rss. Bytes of state moved so far between device
        and host, by the table of `config.residency`: moved_to_host, moved_to_device."""

    def info(self) -> dict[str, Any]:
        """parameters, active_parameters, vocab_size, dtype, device, device_name.

        active_parameters: weights that a token is multiplied with, the embedding look-up left out.
        """
