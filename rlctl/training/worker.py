"""A trainer rank as the driver sees it: the backend's trainer, fed from columns, and its end of the refit.

The only place that knows which backend a name stands for.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.config.schema import TrainerSection
from rlctl.refit.sending import SendingEnd, SendsWeights
from rlctl.training.interface import Loss, LossInParts, MicroBatch, Totals, TrainerRank
from rlctl.training.micro_batching import TrainingSample
from rlctl.training.profile import Profiler, ProfileSpec


@dataclass(frozen=True)
class TrainerSpec:
    """What a rank is made of."""

    config: TrainerSection
    model_path: str
    tokenizer_path: str
    rank: int
    world: int
    init_method: str
    device: str
    temperature: float
    total_updates: int
    seed: int
    profile: ProfileSpec | None


@dataclass(frozen=True)
class RankBatch:
    """A rank's micro-batches as columns: few arrays to ship, whatever the number of sequences.

    tokens int32 [N], mask bool [N], fields name -> float32 [N]; lengths int32 [S]; sizes int32 [M]: sequences
    of each micro-batch.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    fields: dict[str, NDArray[np.float32]]
    lengths: NDArray[np.int32]
    sizes: NDArray[np.int32]

    @classmethod
    def of(cls, micro_batches: list[MicroBatch]) -> "RankBatch":
        """The columns of some micro-batches; all sequences hold the same fields."""
        sequences = [sequence for batch in micro_batches for sequence in batch]
        names = sequences[0].fields if sequences else {}
        return cls(
            _join([sequence.tokens for sequence in sequences], np.dtype(np.int32)),
            _join([sequence.mask for sequence in sequences], np.dtype(np.bool_)),
            {name: _join([sequence.fields[name] for sequence in sequences], np.dtype(np.float32)) for name in names},
            np.array([len(sequence) for sequence in sequences], np.int32),
            np.array([len(batch) for batch in micro_batches], np.int32),
        )

    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches again; arrays are views of the columns."""
        ends = np.cumsum(self.lengths)
        parts = [slice(end - length, end) for end, length in zip(ends, self.lengths)]
        sequences = [
            TrainingSample(
                self.tokens[part], self.mask[part], {name: column[part] for name, column in self.fields.items()}
            )
            for part in parts
        ]
        stops = np.cumsum(self.sizes)
        return [sequences[stop - size : stop] for stop, size in zip(stops, self.sizes)]


class TrainerWorker(SendsWeights):
    """Hosted by `workers.actor.WorkerActor`, one a rank; every method is called on all ranks together."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        import torch

        self._trainer = _backend(spec)
        self._sending = SendingEnd(self._trainer, spec.rank, torch.device(spec.device))
        self._profiler = Profiler(spec.profile, spec.rank)

    def train(self, share: RankBatch, loss: Loss, totals: Totals, before: Totals | None = None) -> dict[str, float]:
        """See `TrainerRank.train`."""
        with self._profiler.update():
            return self._trainer.train(share.micro_batches(), loss, totals, before)

    def accumulate(self, share: RankBatch, loss: LossInParts, totals: Totals, before: Totals | None) -> None:
        """See `TrainerRank.accumulate`."""
        with self._profiler.update(ends=False):
            self._trainer.accumulate(share.micro_batches(), loss, totals, before)

    def warm_up(self, share: RankBatch, loss: Loss, totals: Totals) -> None:
        """See `TrainerRank.warm_up`."""
        self._trainer.warm_up(share.micro_batches(), loss, totals)

    def evaluate(self, share: RankBatch, loss: Loss, totals: Totals) -> dict[str, float]:
        """See `TrainerRank.evaluate`."""
        return self._trainer.evaluate(share.micro_batches(), loss, totals)

    def log_probs(self, share: RankBatch, reference: bool = False) -> NDArray[np.float32]:
        """Log-probs float32 [N] in the order of the share's tokens."""
        compute = self._trainer.reference_log_probs if reference else self._trainer.log_probs
        batches = compute(share.micro_batches())
        joined: NDArray[np.float32] = _join([row for batch in batches for row in batch], np.dtype(np.float32))
        return joined

    def save(self, folder: str, export: str | None, dtype: str | None) -> None:
        """Training state into `folder`; if named, a Hugging Face folder of `dtype` into `export` too."""
        self._trainer.save(Path(folder))
        if export:
            self._trainer.export_folder(Path(export), dtype)
            if self._spec.rank == 0 and self._spec.tokenizer_path != self._spec.model_path:
                _save_tokenizer(self._spec.tokenizer_path, Path(export))

    def load(self, folder: str) -> None:
        """What `save` wrote, by any number of ranks."""
        self._trainer.load(Path(folder))

    def rest(self) -> None:
        """See `TrainerRank.rest`."""
        self._trainer.rest()

    def memory(self) -> dict[str, float]:
        """See `TrainerRank.memory`."""
        return self._trainer.memory()

    def info(self) -> dict[str, Any]:
        """See `TrainerRank.info`."""
        return self._trainer.info()

    def close(self) -> None:
        """Free what the refit holds."""
        self._sending.close()


def _join(parts: list[Any], dtype: np.dtype[Any]) -> Any:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _save_tokenizer(source: str, folder: Path) -> None:
    """The tokenizer that was trained with, in place of the model folder's own."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def trainer_class(backend: str) -> Callable[..., TrainerRank]:
    """Return the class that trains behind a backend's name."""
    trainer: Callable[..., TrainerRank] = importlib.import_module(f"rlctl.training.{backend}.trainer").TRAINER
    return trainer


def _backend(spec: TrainerSpec) -> TrainerRank:
    return trainer_class(spec.config.backend)(
        spec.config,
        spec.model_path,
        rank=spec.rank,
        world=spec.world,
        init_method=spec.init_method,
        device=spec.device,
        temperature=spec.temperature,
        total_updates=spec.total_updates,
        seed=spec.seed,
    )
