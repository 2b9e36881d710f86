"""The trainer group as the loops use it: whole batches in, results out, whatever the number of ranks."""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.config.schema import TrainerSection
from rlctl.preflight.backend import layout_of
from rlctl.training.interface import Loss, LossInParts, Totals
from rlctl.training.micro_batching import TrainingSample, plan_micro_batches
from rlctl.training.worker import RankBatch, TrainerWorker
from rlctl.workers.errors import WorkerError
from rlctl.workers.group import WorkerGroup


@dataclass(frozen=True)
class PreparedBatch:
    """A batch as it travels: every rank's share, and the normalisers over all of them.

    lengths: of all sequences, each once, however many ranks get it.
    """

    shares: list[RankBatch]
    totals: Totals
    lengths: list[int]


class TrainerGroup:
    """Splits batches over a group's shards of data, in micro-batches of at most `micro_batch_tokens`.

    The ranks of a shard get the same sequences and, of what concerns them, give the same answers.
    """

    def __init__(self, group: WorkerGroup, section: TrainerSection) -> None:
        self.group = group
        self._tokens = section.micro_batch_tokens
        shape = layout_of(section)
        self._shards = shape.shards
        # Tokens that are worth a call of their own: whole groups fill the last of their micro-batches half, and a
        # pipeline needs several to keep its stages busy.
        self.worthwhile = 2 * shape.pipeline * self._tokens * (max(self._shards) + 1)

    def prepare(self, sequences: Rows[TrainingSample]) -> PreparedBatch:
        """What `train` does before it calls the ranks. Beside a call that runs, on any thread."""
        totals = Totals(int(sum(int(sequence.mask.sum()) for sequence in sequences)), len(sequences))
        return PreparedBatch(self._shares(self._plan(sequences), sequences), totals, list(map(len, sequences)))

    def train(
        self, batch: Rows[TrainingSample] | PreparedBatch, loss: Loss, before: Totals | None = None
    ) -> dict[str, float]:
        """One optimizer update on all sequences; normalisers are over all of them.

        before: what `accumulate` returned; the batch is then the update's last part. Raises FloatingPointError, with
        nothing updated, for a loss or a gradient norm that is not finite.
        """
        try:
            metrics: dict[str, float] = self._run(TrainerWorker.train, batch, loss, before)[0]
        except WorkerError as error:
            if any(failure.type != FloatingPointError.__name__ for failure in error.failures):
                raise
            # The rank that holds a bad gradient names it; the others know but that there is one.
            raise FloatingPointError(max((failure.text for failure in error.failures), key=len)) from error
        return metrics

    def accumulate(self, batch: Rows[TrainingSample], loss: LossInParts, before: Totals | None) -> Totals:
        """The gradients of a part of the next update, see `TrainerRank.accumulate`. before: of the parts so far.

        Returns the totals of all parts, this one included.
        """
        return self._run(TrainerWorker.accumulate, batch, loss, before)[1]

    def evaluate(self, sequences: Rows[TrainingSample], loss: Loss) -> dict[str, float]:
        """The loss's metrics without an update."""
        metrics: dict[str, float] = self._run(TrainerWorker.evaluate, sequences, loss)[0]
        return metrics

    def warm_up(self, count: int, length: int, loss: Loss) -> None:
        """Go through `count` made-up sequences of `length` tokens, forwards and back, without an update."""
        # All sorts of tokens: one alone would send every one of them to the same experts.
        tokens, mask = np.arange(length, dtype=np.int32) % self.info()["vocab_size"], np.ones(length, np.bool_)
        self._run(TrainerWorker.warm_up, [TrainingSample(tokens, mask)] * count, loss)

    def log_probs(self, sequences: Rows[TrainingSample], reference: bool = False) -> list[NDArray[np.float32]]:
        """Log-probs float32 [T] of each sequence, in order; of the reference policy if asked."""
        plan = self._plan(sequences)
        found = self.group.run(TrainerWorker.log_probs, [(share, reference) for share in self._shares(plan, sequences)])
        answers: list[Any] = [None] * len(sequences)
        for shard, columns in dict(zip(self._shards, found)).items():
            start = 0
            for index in (index for batch in plan[shard] for index in batch):
                answers[index] = columns[start : start + len(sequences[index])]
                start += len(sequences[index])
        return answers

    def save(self, folder: Path, export: Path | None, dtype: str | None) -> None:
        """Training state into `folder`; a Hugging Face folder of `dtype` (None: the compute dtype) into `export`.

        Raises RuntimeError if nothing of it is seen from here.
        """
        self.group.call(TrainerWorker.save, str(folder), str(export) if export else None, dtype)
        if not any(folder.iterdir()):
            raise RuntimeError(f"the ranks wrote no state into {folder}: do their nodes see another run.dir?")

    def info(self) -> dict[str, Any]:
        """Rank 0's facts about the model."""
        return self.group.call(TrainerWorker.info)[0]

    def _run(
        self, method: Callable[..., Any], batch: Rows[TrainingSample] | PreparedBatch, loss: Loss, *parts: Totals | None
    ) -> tuple[Any, Totals]:
        """Rank 0's answer, and the totals that all ranks were given. parts: of methods that know them, those before."""
        ready = batch if isinstance(batch, PreparedBatch) else self.prepare(batch)
        before = parts[0] if parts else None
        if before is not None and not ready.totals.sequences:
            # A last part of which nothing is left still makes its update.
            ready = replace(ready, shares=[RankBatch.of([[]]) for _ in ready.shares])
        totals = ready.totals if before is None else before + ready.totals
        return self.group.run(method, [(share, loss, totals, *parts) for share in ready.shares])[0], totals

    def _plan(self, sequences: Rows[TrainingSample]) -> list[list[list[int]]]:
        return plan_micro_batches([len(sequence) for sequence in sequences], max(self._shards) + 1, self._tokens)

    def _shares(self, plan: list[list[list[int]]], sequences: Rows[TrainingSample]) -> list[RankBatch]:
        """Of every rank."""
        shares = [RankBatch.of([[sequences[index] for index in batch] for batch in shard]) for shard in plan]
        return [shares[shard] for shard in self._shards]
