"""The trainer group on the driver: splits each batch over the ranks, calls the ranks and joins their results."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlctl.preflight.backend import layout_of
from rlctl.preflight.declared_columns import Role
from rlctl.preflight.trainer_settings import TrainerSettings
from rlctl.training.interface import Loss, LossNeeds, Totals
from rlctl.training.metric_rows import GRAD_NORM
from rlctl.training.micro_batching import (
    TrainingSample,
    plan_micro_batches,
    plan_whole_rollouts,
    rollout_index,
    row_tokens,
)
from rlctl.training.trainer_save import TrainerSave
from rlctl.training.trainer_worker import RankBatch, TrainerWorker
from rlctl.workers.errors import WorkerDied, WorkerError, WorkerTimeout
from rlctl.workers.group import WorkerGroup

R = TypeVar("R")
Timed = Callable[[], AbstractContextManager[None]]
NOTHING_NEEDED = LossNeeds()
# Reasons why an update made no optimizer step (`Update.skip_cause`).
NO_TOKEN = "it has no token to train on"
NO_GRADIENT = "its gradient is exactly 0"


@dataclass(frozen=True)
class PreparedBatch:
    """A batch of samples, split over the ranks."""

    # Share of each rank, by rank.
    shares: list[RankBatch]
    # Numbers of tokens, sequences and rollouts in the whole batch.
    totals: Totals
    # Number of tokens of each sequence of the batch, in the order given.
    lengths: list[int]
    # Number of padding tokens, for a model that cannot be packed; None for packs.
    padding: int | None = None


class Update:
    """One open optimizer update, to which samples are added. Made by `TrainerGroup.update`."""

    def __init__(self, trainer: "TrainerGroup", loss: Loss, in_parts: bool, timed: Timed) -> None:
        self._trainer = trainer
        self._loss = loss
        self._in_parts = in_parts
        self._timed = timed
        self._totals = Totals(0, 0, 0)
        self._tokens = 0
        self._padding = 0
        # The last part, until it is sent to the ranks.
        self._unsent: PreparedBatch | None = None
        # Number of parts so far, without those that had no samples.
        self.parts = 0
        # True once a part was sent to the ranks.
        self._has_sent = False
        # Metrics of the finished update: metrics of the loss, train/grad_norm and train/lr. Empty if no sample had a
        # token to train on.
        self.metrics: dict[str, float] = {}

    @property
    def skip_cause(self) -> str:
        """Reason why the finished update made no optimizer step; empty if it made one."""
        if not self.metrics:
            return NO_TOKEN
        return "" if self.metrics[GRAD_NORM.name] else NO_GRADIENT

    def accumulate(self, samples: Rows[TrainingSample] | PreparedBatch) -> None:
        """Add some samples, as one part of the update. May be called any number of times."""
        with self._timed():
            batch = samples if isinstance(samples, PreparedBatch) else self._trainer.prepare(samples, self._loss.needs)
            if not batch.totals.sequences:
                return
            self._send_unsent()
            self._tokens += sum(batch.lengths)
            self._padding += batch.padding or 0
            self._totals += batch.totals
            self._unsent = batch
            self.parts += 1
            if self._in_parts:
                self._send_unsent()

    def _send_unsent(self) -> None:
        if self._unsent:
            self._trainer.group.run(TrainerWorker.accumulate, [(share, self._loss) for share in self._unsent.shares])
            self._unsent = None
            self._has_sent = True

    def _finish_update(self) -> None:
        if not self.parts:
            return
        shares = [RankBatch.from_micro_batches([])] * len(self._trainer.group)
        if self._unsent:
            shares = self._unsent.shares
        arguments = [(share, self._loss, self._totals) for share in shares]
        try:
            self.metrics = self._trainer.group.run(TrainerWorker.train, arguments)[0]
        except WorkerError as error:
            if any(failure.type != FloatingPointError.__name__ for failure in error.failures):
                raise
            # Raise the longest message, because only a rank that holds a gradient that is not finite can name it.
            raise FloatingPointError(max((failure.text for failure in error.failures), key=len)) from error
        if self.metrics and self._trainer.padded:
            self.metrics["train/padding"] = self._padding / (self._tokens + self._padding)

    def _discard(self, error: Exception) -> None:
        # Ranks that died or hang would not answer the call.
        if self._has_sent and not isinstance(error, WorkerDied | WorkerTimeout):
            with suppress(WorkerError, WorkerDied, WorkerTimeout):
                self._trainer.group.call(TrainerWorker.discard)


class TrainerGroup:
    """Group of trainer ranks. Splits batches over data shards, in micro-batches of at most `micro_batch_tokens` tokens.

    A data shard is a set of ranks that train on the same sequences, for example tensor-parallel ranks. All ranks of a
    data shard get the same sequences and return equal results.
    """

    def __init__(self, group: WorkerGroup, section: TrainerSettings) -> None:
        self.group = group
        self._tokens = section.micro_batch_tokens
        # True if the model cannot be packed: each sequence is a padded row.
        self.padded = section.is_padded
        layout = layout_of(section)
        # Index of each rank's data shard, by rank.
        self._shards = layout.shards
        # Fewest tokens of a part that is worth a call to the ranks: two micro-batches for each data shard and pipeline
        # stage. With fewer, a half-full last micro-batch costs too much, and stages of the pipeline are idle.
        self.worthwhile = 2 * layout.pipeline * section.micro_batch_tokens * layout.data

    def prepare(self, sequences: Rows[TrainingSample], needs: LossNeeds = NOTHING_NEEDED) -> PreparedBatch:
        """Split a batch over the ranks. May run on any thread, also while the ranks work."""
        # A sequence without a rollout number is a whole rollout.
        numbers = {sequence.rollout for sequence in sequences if sequence.rollout is not None}
        whole_rollouts = sum(sequence.rollout is None for sequence in sequences)
        totals = Totals(
            tokens=sum(int(sequence.mask.sum()) for sequence in sequences),
            sequences=len(sequences),
            rollouts=len(numbers) + whole_rollouts,
        )
        plan = self._plan_batch(sequences, needs)
        lengths = [len(sequence) for sequence in sequences]
        padding = row_tokens(plan, lengths) - sum(lengths) if self.padded else None
        return PreparedBatch(shares=self._make_shares(plan, sequences), totals=totals, lengths=lengths, padding=padding)

    @contextmanager
    def update(self, loss: Loss, *, in_parts: bool = False, timed: Timed = nullcontext) -> Iterator[Update]:
        """Make one optimizer update with the samples that the block accumulates.

        Leaving the block makes the optimizer step and fills `Update.metrics`. An exception in the block discards the
        update. Raises FloatingPointError for a loss or a gradient norm that is not finite, and then changes no weight.

        in_parts: True to send each part to the ranks at once, which work on it while other rollouts are being sampled.
        False: the last part is sent together with the step, so that an update of one part is one call. timed: returns
        a context manager. It is entered while the update works, and not while the block does other work.
        """
        update = Update(self, loss, in_parts, timed)
        try:
            yield update
        except Exception as error:
            update._discard(error)
            raise
        with timed():
            update._finish_update()

    def evaluate(self, sequences: Rows[TrainingSample], loss: Loss) -> dict[str, float]:
        """Return the loss's metrics over the sequences, by name. No weight changes."""
        return self._run_shares(TrainerWorker.evaluate, sequences, loss)[0]

    def warm_up(
        self, count: int, length: int, loss: Loss, roles: Iterable[Role] = (), valuing: Iterable[Role] = ()
    ) -> None:
        """Run forward and backward passes over `count` made-up sequences of `length` tokens, without an update.

        roles: models of which one pass runs too, which loads their weights. valuing: the same, with a value head.
        """
        # Different tokens, because equal tokens would all go to the same experts.
        tokens = np.arange(length, dtype=np.int32) % self.info()["vocab_size"]
        sequences = [TrainingSample(tokens, mask=np.ones(length, np.bool_))] * count
        self._run_shares(TrainerWorker.warm_up, sequences, loss)
        for role in roles:
            self.log_probs(sequences, role)
        for role in valuing:
            self.values(sequences, role)

    def log_probs(self, sequences: Rows[TrainingSample], role: Role = "policy") -> list[NDArray[np.float32]]:
        """Return log-probs float32 [T] of each sequence under the weights of `role`, in order."""
        return self._run_column(TrainerWorker.log_probs, sequences, role, self._plan_batch(sequences))

    def values(self, sequences: Rows[TrainingSample], role: Role = "policy") -> list[NDArray[np.float32]]:
        """Return the value head's outputs float32 [T] of each sequence under the weights of `role`, in order.

        The output at a token is the value of the tokens up to and including it: a reward model's score of a sequence is
        its last output.
        """
        lengths = [len(sequence) for sequence in sequences]
        # A pass without gradients and logits has room for a sequence that is longer than those of an update.
        most_tokens = max(self._tokens, *lengths)
        plan = plan_micro_batches(lengths, max(self._shards) + 1, most_tokens, self.padded)
        return self._run_column(TrainerWorker.values, sequences, role, plan)

    def _run_column(
        self,
        method: Callable[[Any, RankBatch, Role], NDArray[np.float32]],
        sequences: Rows[TrainingSample],
        role: Role,
        plan: list[list[list[int]]],
    ) -> list[NDArray[np.float32]]:
        arguments = [(share, role) for share in self._make_shares(plan, sequences)]
        return self._order_by_sequence(plan, sequences, self.group.run(method, arguments))

    def exact_log_probs(self, sequences: Rows[TrainingSample]) -> list[NDArray[np.float32]] | None:
        """Return the policy's log-probs float32 [T] of each sequence, computed in float32 with the rounded weights.

        None: the backend cannot compute in float32 with weights that are rounded to the compute dtype.
        """
        plan = self._plan_batch(sequences)
        arguments = [(share,) for share in self._make_shares(plan, sequences)]
        answers = self.group.run(TrainerWorker.exact_log_probs, arguments)
        # All ranks have the same backend, so either all answers are None or none is.
        log_probs_of_ranks = [answer for answer in answers if answer is not None]
        return self._order_by_sequence(plan, sequences, log_probs_of_ranks) if log_probs_of_ranks else None

    def begin_save(self, folder: Path, export: Path | None, dtype: str | None, beside_training: bool) -> TrainerSave:
        """Begin to write training state into `folder`, and a Hugging Face folder into `export` unless it is None.

        dtype: of the exported weights; None for the compute dtype. beside_training: True if ranks copy their state
        first, so that training goes on while they write.
        """
        export_path = str(export) if export else None
        answers = self.group.call(TrainerWorker.begin_save, str(folder), export_path, dtype, beside_training)
        return TrainerSave.from_answers(self.group, folder, export, answers)

    def info(self) -> dict[str, Any]:
        """Return facts about the model, such as vocab_size and parameters; see `TrainerRank.info`."""
        return self.group.call(TrainerWorker.info)[0]

    def suspects(self) -> str:
        """Return a sentence with the parts of the model that an engine may compute differently."""
        return self.group.call(TrainerWorker.suspects)[0]

    def _run_shares(
        self, method: Callable[[Any, RankBatch, Loss], R], sequences: Rows[TrainingSample], loss: Loss
    ) -> list[R]:
        shares = self._make_shares(self._plan_batch(sequences, loss.needs), sequences)
        return self.group.run(method, [(share, loss) for share in shares])

    def _plan_batch(self, sequences: Rows[TrainingSample], needs: LossNeeds = NOTHING_NEEDED) -> list[list[list[int]]]:
        lengths = [len(sequence) for sequence in sequences]
        shards = max(self._shards) + 1
        if needs.whole_rollouts and any(sequence.rollout is not None for sequence in sequences):
            rollouts = rollout_index([sequence.rollout for sequence in sequences])
            return plan_whole_rollouts(lengths, rollouts, shards, self._tokens, self.padded)
        return plan_micro_batches(lengths, shards, self._tokens, self.padded)

    def _order_by_sequence(
        self,
        plan: list[list[list[int]]],
        sequences: Rows[TrainingSample],
        columns_of_ranks: list[NDArray[np.float32]],
    ) -> list[NDArray[np.float32]]:
        """Return one array for each sequence, in the order of `sequences`, cut from the ranks' concatenated arrays."""
        parts: list[Any] = [None] * len(sequences)
        # Ranks of one data shard have equal arrays, of which `dict` keeps the last.
        for shard, column in dict(zip(self._shards, columns_of_ranks)).items():
            start = 0
            for index in chain.from_iterable(plan[shard]):
                end = start + len(sequences[index])
                parts[index] = column[start:end]
                start = end
        return parts

    def _make_shares(self, plan: list[list[list[int]]], sequences: Rows[TrainingSample]) -> list[RankBatch]:
        """Return the share of each rank, by rank. plan: plan[shard][micro-batch] is a list of indices of sequences."""
        shares = []
        for batches in plan:
            micro_batches = [[sequences[index] for index in batch] for batch in batches]
            shares.append(RankBatch.from_micro_batches(micro_batches))
        return [shares[shard] for shard in self._shards]
