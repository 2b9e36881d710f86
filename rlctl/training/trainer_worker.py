"""Worker process of one trainer rank: receives samples as arrays, calls the backend's trainer, sends weights."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.preflight.declared_columns import Role, column_of
from rlctl.refit.sender import SendsWeights
from rlctl.training.interface import Loss, MicroBatch, Totals
from rlctl.training.micro_batching import TrainingSample
from rlctl.training.profile import Profiler
from rlctl.training.rank import make_trainer
from rlctl.training.rank_checkpoint import FilesWritten, PiecesRead, SaveBegun
from rlctl.training.spec import TrainerSpec
from rlctl.utils.code_cache import keep_code


@dataclass(frozen=True)
class RankBatch:
    """A rank's micro-batches, with the S sequences concatenated to N tokens. A few arrays ship faster than many."""

    # int32 [N].
    tokens: NDArray[np.int32]
    # bool [N]: true at the tokens to train on.
    mask: NDArray[np.bool_]
    # Name -> [N, *shape].
    columns: dict[str, NDArray[np.float32]]
    # int32 [S]: number of tokens of each sequence.
    lengths: NDArray[np.int32]
    # int32 [M]: number of sequences in each micro-batch.
    sizes: NDArray[np.int32]
    # int32 [S]: `TrainingSample.rollout` of each sequence, -1 for None. The array is None if no sequence has a number.
    rollouts: NDArray[np.int32] | None = None

    @classmethod
    def from_micro_batches(cls, micro_batches: list[MicroBatch]) -> "RankBatch":
        """Concatenate the sequences of some micro-batches. All sequences must have the same columns."""
        sequences = list(chain.from_iterable(micro_batches))
        columns = {}
        for name in sequences[0].columns if sequences else ():
            parts = [sequence.columns[name] for sequence in sequences]
            columns[name] = np.concatenate(parts, dtype=column_of(name).dtype)
        rollouts = None
        if any(sequence.rollout is not None for sequence in sequences):
            numbers = [-1 if sequence.rollout is None else sequence.rollout for sequence in sequences]
            rollouts = np.array(numbers, np.int32)
        return cls(
            tokens=_concatenate_parts([sequence.tokens for sequence in sequences], np.dtype(np.int32)),
            mask=_concatenate_parts([sequence.mask for sequence in sequences], np.dtype(np.bool_)),
            columns=columns,
            lengths=np.array([len(sequence) for sequence in sequences], np.int32),
            sizes=np.array([len(batch) for batch in micro_batches], np.int32),
            rollouts=rollouts,
        )

    def micro_batches(self) -> list[MicroBatch]:
        """Return the micro-batches that `from_micro_batches` got. Their arrays are views of these arrays."""
        sequences = []
        for row, (end, length) in enumerate(zip(np.cumsum(self.lengths), self.lengths)):
            part = slice(end - length, end)
            rollout = None
            if self.rollouts is not None and self.rollouts[row] >= 0:
                rollout = int(self.rollouts[row])
            sequences.append(
                TrainingSample(
                    tokens=self.tokens[part],
                    mask=self.mask[part],
                    columns={name: column[part] for name, column in self.columns.items()},
                    rollout=rollout,
                )
            )
        return [sequences[end - size : end] for end, size in zip(np.cumsum(self.sizes), self.sizes)]


class TrainerWorker(SendsWeights):
    """One trainer rank in its process, called through `workers.actor.WorkerActor`.

    Each method calls the method of the same name of `TrainerRank`, where it is documented.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        import torch

        if spec.config.compile or spec.device != "cpu":
            keep_code()
        self._trainer = make_trainer(spec)
        super().__init__(self._trainer, spec.rank, torch.device(spec.device))
        self._profiler = Profiler(spec.profile, spec.rank)

    def train(self, share: RankBatch, loss: Loss, totals: Totals) -> dict[str, float]:
        with self._profiler.update():
            return self._trainer.train(share.micro_batches(), loss, totals)

    def accumulate(self, share: RankBatch, loss: Loss) -> None:
        with self._profiler.update(ends=False):
            self._trainer.accumulate(share.micro_batches(), loss)

    def discard(self) -> None:
        self._trainer.discard()

    def warm_up(self, share: RankBatch, loss: Loss) -> None:
        self._trainer.warm_up(share.micro_batches(), loss)

    def evaluate(self, share: RankBatch, loss: Loss) -> dict[str, float]:
        return self._trainer.evaluate(share.micro_batches(), loss)

    def log_probs(self, share: RankBatch, role: Role = "policy") -> NDArray[np.float32]:
        """Return the log-prob of every token of the share under the weights of `role`, float32 [N]."""
        return _flatten_columns(self._trainer.log_probs(share.micro_batches(), role))

    def values(self, share: RankBatch, role: Role = "policy") -> NDArray[np.float32]:
        """Return the value head's output at every token of the share under the weights of `role`, float32 [N]."""
        return _flatten_columns(self._trainer.values(share.micro_batches(), role))

    def exact_log_probs(self, share: RankBatch) -> NDArray[np.float32] | None:
        """Return the policy's log-probs float32 [N], computed in float32 with weights rounded to the compute dtype.

        None: the backend cannot compute in float32.
        """
        log_probs = self._trainer.exact_log_probs(share.micro_batches())
        return None if log_probs is None else _flatten_columns(log_probs)

    def begin_save(self, folder: str, export: str | None, dtype: str | None, beside_training: bool) -> SaveBegun:
        """Begin to write training state into `folder` and, unless `export` is None, an exported model into `export`."""
        return self._trainer.begin_save(Path(folder), Path(export) if export else None, dtype, beside_training)

    def wait_for_files(self, wait_s: float) -> FilesWritten | None:
        return self._trainer.saving.wait_for_files(wait_s)

    def wait_for_pieces(self, wait_s: float) -> PiecesRead | None:
        return self._trainer.saving.wait_for_pieces(wait_s)

    def load(self, folder: str) -> None:
        self._trainer.load(Path(folder))

    def rest(self) -> None:
        self._trainer.rest()

    def memory(self) -> dict[str, float]:
        return self._trainer.memory()

    def info(self) -> dict[str, Any]:
        return self._trainer.info()

    def suspects(self) -> str:
        return self._trainer.suspects()

    def close(self) -> None:
        """Free the buffers and connections for sending weights."""
        self.refit_close()


def _flatten_columns(batches: list[list[NDArray[np.float32]]]) -> NDArray[np.float32]:
    """Return the values of all sequences of all micro-batches, concatenated: float32 [N]."""
    flat: NDArray[np.float32] = _concatenate_parts(list(chain.from_iterable(batches)), np.dtype(np.float32))
    return flat


def _concatenate_parts(parts: list[Any], dtype: np.dtype[Any]) -> Any:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
