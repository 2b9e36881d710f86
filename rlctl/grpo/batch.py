"""From sampled groups to training sequences, with their advantages and the outcome of each prompt.

Every drawn prompt is trained, filtered or dropped. A filtered or dropped one has a reason (contract 2).

A batch gets its advantages once it has the last column that they read: in `make_batch`, or later in `add_column`.
"""

from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.config.grpo_schema import GrpoSection
from rlctl.grpo.advantages.base import Advantage, ScoredRollouts, token_advantages
from rlctl.grpo.group_filter import why_left_out, why_nothing
from rlctl.preflight.declared_columns import ADVANTAGE, AGE, ROLLOUT_LOG_PROB
from rlctl.rollout.conversation import TrajectoryRow
from rlctl.rollout.types import Rollout, RolloutGroup
from rlctl.run.health import StopBeforeUpdateError
from rlctl.training.micro_batching import TrainingSample

NOT_FINITE = "log-probs that are not finite"


@dataclass
class TaskOutcomes:
    """Ids of the prompts by outcome. Filtered and dropped prompts are kept as reason -> ids."""

    trained: list[str] = field(default_factory=list)
    filtered: dict[str, list[str]] = field(default_factory=dict)
    dropped: dict[str, list[str]] = field(default_factory=dict)

    def add(self, other: "TaskOutcomes") -> None:
        """Add the outcomes of another batch."""
        self.trained += other.trained
        for reason, ids in other.filtered.items():
            self.filtered.setdefault(reason, []).extend(ids)
        for reason, ids in other.dropped.items():
            self.dropped.setdefault(reason, []).extend(ids)


@dataclass(frozen=True)
class LeftOut:
    """A rollout that reaches no update: one of its log-probs is NaN or infinite."""

    prompt_id: str
    # Index of the rollout in its group.
    rollout: int
    # Index of the token among the sampled tokens.
    token: int
    # Name of the column, and its value at the token: "nan", "inf" or "-inf".
    column: str
    value: str

    def __str__(self) -> str:
        return f"prompt {self.prompt_id}, rollout {self.rollout}, token {self.token}: {self.column} is {self.value}"


@dataclass(frozen=True)
class TrainingBatch:
    """Sequences to train on, the rollouts behind their advantages, and the outcome of each prompt."""

    sequences: list[TrainingSample]
    # Rollouts that count in baselines. Their `group` is an index into the list of groups.
    scored: ScoredRollouts
    # bool [rollouts]: true for cut rollouts, which reach no update (`grpo.overlong.mask`). Their sequences stay in the
    # batch only until the advantages are computed, which may read their columns.
    cut: NDArray[np.bool_]
    # int64 [sequences]: index into `scored` of each sequence's rollout.
    rows: NDArray[np.int64]
    outcomes: TaskOutcomes
    # (prompt's id, index of the rollout in its group) of each sequence.
    places: list[tuple[str, int]]
    # Rollouts that are not trained and do not count in baselines.
    left_out: list[LeftOut]

    @classmethod
    def join(cls, batches: "Rows[TrainingBatch]", groups: Rows[int]) -> "TrainingBatch":
        """Return several batches as one. groups: number of groups of each batch."""
        outcomes = TaskOutcomes()
        for batch in batches:
            outcomes.add(batch.outcomes)
        starts = np.cumsum([0, *groups[:-1]])
        scored = [replace(batch.scored, group=batch.scored.group + start) for batch, start in zip(batches, starts)]
        first_rows = np.cumsum([0, *map(len, scored[:-1])])
        return cls(
            sequences=list(chain.from_iterable(batch.sequences for batch in batches)),
            scored=ScoredRollouts.join(scored),
            cut=np.concatenate([batch.cut for batch in batches]),
            rows=np.concatenate([batch.rows + first for batch, first in zip(batches, first_rows)]),
            outcomes=outcomes,
            places=list(chain.from_iterable(batch.places for batch in batches)),
            left_out=list(chain.from_iterable(batch.left_out for batch in batches)),
        )

    @property
    def owners(self) -> NDArray[np.int64]:
        """Group of each sequence."""
        return self.scored.group[self.rows]

    def column(self, name: str) -> list[NDArray[np.float32]]:
        """Return one column of every sequence."""
        return [sequence.columns[name] for sequence in self.sequences]

    def shares(self, count: int) -> list[list[TrainingSample]]:
        """Split the sequences into `count` updates: whole groups, in drawing order, as many in each as possible."""
        groups = np.unique(self.owners)
        parts = [part for part in np.array_split(groups, count) if len(part)]
        return [[self.sequences[row] for row in np.flatnonzero(np.isin(self.owners, part))] for part in parts]


def make_batch(
    groups: Rows[RolloutGroup], config: GrpoSection, advantage: Advantage, version: int | None = None
) -> TrainingBatch:
    """Return the samples of groups, and the outcome of each task.

    Rollouts without a score, or with a log-prob that is not finite, are left out, and count in no baseline. A group
    without any other rollout is dropped. A group that teaches nothing may be filtered. Cut rollouts may be masked: they
    reach no update, but count in baselines.

    version: version of the weights to train. If given, the samples get a column with the age of each token, in steps.
    If the advantages read columns that are still to be computed, the batch has no advantages until `add_column`.
    """
    outcomes = TaskOutcomes()
    left_out: list[LeftOut] = []
    owners: list[int] = []
    rollouts: list[Rollout] = []
    for index, group in enumerate(groups):
        bad_rollouts = _find_bad_rollouts(group)
        left_out += bad_rollouts.values()
        scored = _scored_rollouts(group, bad_rollouts)
        if not scored:
            cause = NOT_FINITE if bad_rollouts else "no rollout could be scored"
            outcomes.dropped.setdefault(cause, []).append(group.task.id)
            continue
        if reason := why_left_out(scored, config):
            outcomes.filtered.setdefault(reason, []).append(group.task.id)
            continue
        outcomes.trained.append(group.task.id)
        owners += [index] * len(scored)
        rollouts += [rollout for rollout, _ in scored]
    cut = np.array([config.overlong.mask and rollout.is_cut for rollout in rollouts], np.bool_)
    rows: list[int] = []
    samples: list[TrainingSample] = []
    for index, rollout in enumerate(rollouts):
        if advantage.columns or not cut[index]:
            rollout_number = index if len(rollout.rows) > 1 else None
            samples += [training_sample(row, None, version, rollout_number) for row in rollout.rows]
            rows += [index] * len(rollout.rows)
    batch = TrainingBatch(
        sequences=samples,
        scored=ScoredRollouts.read(rollouts, owners),
        cut=cut,
        rows=np.array(rows, np.int64),
        outcomes=outcomes,
        places=[(rollouts[row].id.task, rollouts[row].id.index) for row in rows],
        left_out=left_out,
    )
    return _with_advantages(batch, advantage)


def why_it_teaches_nothing(config: GrpoSection, group: RolloutGroup) -> str | None:
    """Return the reason why another group must be sampled in place of this one; None if this group is kept.

    A group without any scored rollout is kept, since it is dropped later and counted among the failures. So is a group
    whose rewards ask the run to stop.
    """
    if group.stop:
        return None
    scored = _scored_rollouts(group, _find_bad_rollouts(group))
    return why_left_out(scored, config) if scored and config.dynamic_sampling.filter else None


def raise_if_stopped(groups: Iterable[RolloutGroup]) -> None:
    """Raise StopBeforeUpdateError if a reward of these groups asks the run to stop."""
    for group in groups:
        if group.stop:
            raise StopBeforeUpdateError(group.stop)


def is_uniform(group: RolloutGroup) -> bool:
    """Return True if all rollouts that `make_batch` does not leave out have the same reward."""
    return len({reward for _, reward in _scored_rollouts(group, _find_bad_rollouts(group))}) == 1


def _scored_rollouts(group: RolloutGroup, bad_rollouts: Container[int]) -> list[tuple[Rollout, float]]:
    """Return each scored rollout with its reward. bad_rollouts: indices of the rollouts to leave out."""
    pairs = [(rollout, rollout.reward) for rollout in group.rollouts if rollout.id.index not in bad_rollouts]
    return [(rollout, reward) for rollout, reward in pairs if reward is not None]


def _find_bad_rollouts(group: RolloutGroup) -> dict[int, LeftOut]:
    """Return index -> `LeftOut` of the rollouts with a generator's log-prob that is not finite."""
    bad_rollouts = {}
    for rollout in group.rollouts:
        place = (group.task.id, rollout.id.index)
        if left_out := _find_bad_token(place, ROLLOUT_LOG_PROB.name, rollout.log_probs, rollout.sampled):
            bad_rollouts[rollout.id.index] = left_out
    return bad_rollouts


def _find_bad_token(
    place: tuple[str, int], column: str, values: NDArray[np.float32], sampled: NDArray[np.bool_]
) -> LeftOut | None:
    """Return the first sampled token at which a column is not finite; None if every sampled token is finite.

    place: prompt's id and rollout's index. values: [T, *shape] of a trajectory. sampled: [T].
    """
    finite = np.isfinite(values).reshape(len(values), -1).all(-1)
    # Return early in the usual case, which saves an array for each rollout.
    if finite.all():
        return None
    bad_tokens = np.flatnonzero(sampled & ~finite)
    if not len(bad_tokens):
        return None
    first = bad_tokens[0]
    return LeftOut(
        prompt_id=place[0],
        rollout=place[1],
        token=int(np.count_nonzero(sampled[:first])),
        column=column,
        value=str(float(values[first].sum())),
    )


def add_column(
    batch: TrainingBatch, name: str, values: Rows[NDArray[np.float32]], config: GrpoSection, advantage: Advantage
) -> TrainingBatch:
    """Return the batch with one more column, and with advantages if this was the last column that they read.

    values: float32 [T, *shape] for each sequence. A rollout with a value that is not finite is left out: its reward
    counts in no baseline.
    """
    bad_rollouts: dict[int, LeftOut] = {}
    for row, place, sequence, column in zip(batch.rows, batch.places, batch.sequences, values):
        if left_out := _find_bad_token(place, name, column, sequence.mask):
            bad_rollouts.setdefault(int(row), left_out)
    finite_sequences = np.flatnonzero(~np.isin(batch.rows, list(bad_rollouts)))
    extended = replace(
        batch,
        sequences=with_column(batch.sequences, name, values),
        left_out=[*batch.left_out, *bad_rollouts.values()],
    )
    if bad_rollouts:
        extended = _select_sequences(extended, finite_sequences, config)
    is_due = bad_rollouts or any(ADVANTAGE.name not in sequence.columns for sequence in extended.sequences)
    return _with_advantages(extended, advantage) if is_due else extended


def _select_sequences(batch: TrainingBatch, finite: NDArray[np.int64], config: GrpoSection) -> TrainingBatch:
    """Return the batch with only the sequences at the indices `finite`.

    The outcomes of its tasks are computed again, as if `make_batch` had got only these sequences.
    """
    scored = batch.scored
    counts = np.ones(len(scored), np.bool_)
    counts[np.delete(batch.rows, finite)] = False
    # A group is trained if one of its finite sequences is not masked.
    trained_groups = np.unique(scored.group[batch.rows[finite][~batch.cut[batch.rows[finite]]]])
    counts &= np.isin(scored.group, trained_groups)
    filter_reasons: dict[int, str] = {}
    for group in trained_groups.tolist():
        members = counts & (scored.group == group)
        rewards = scored.reward[members].tolist()
        right = scored.right[members].tolist()
        if reason := why_nothing(rewards, right, config.dynamic_sampling.filter):
            filter_reasons[group] = reason
            counts &= ~members
    filtered: dict[str, str] = {}
    for index in finite:
        reason = filter_reasons.get(int(batch.owners[index]))
        if reason is not None:
            filtered[batch.places[index][0]] = reason
    selected = finite[counts[batch.rows[finite]]]
    places = [batch.places[index] for index in selected]
    return TrainingBatch(
        sequences=[batch.sequences[index] for index in selected],
        scored=scored.select(counts),
        cut=batch.cut[counts],
        rows=(np.cumsum(counts) - 1)[batch.rows[selected]],
        outcomes=_restrict_outcomes(batch.outcomes, {task_id for task_id, _ in places}, filtered),
        places=places,
        left_out=batch.left_out,
    )


def _with_advantages(batch: TrainingBatch, advantage: Advantage) -> TrainingBatch:
    """Return the batch with its advantages; return it unchanged while a column that they read is missing."""
    needed_columns = set(advantage.columns)
    if not all(sequence.columns.keys() >= needed_columns for sequence in batch.sequences):
        return batch
    sequences_by_rollout: list[list[TrainingSample]] = [[] for _ in range(len(batch.scored))]
    for sequence, row in zip(batch.sequences, batch.rows):
        sequences_by_rollout[row].append(sequence)
    scored = batch.scored
    if not scored.columns:
        # Copy the columns to `scored`, because the sequences of cut rollouts are dropped below.
        columns = {name: _sampled_column(sequences_by_rollout, name) for name in advantage.columns}
        scored = replace(scored, columns=columns)
    advantages = token_advantages(advantage, scored)
    advantaged = list(chain.from_iterable(sequences_by_rollout))
    sampled_columns: dict[str, Rows[NDArray[np.floating[Any]]]] = {ADVANTAGE.name: advantages}
    sampled_columns |= advantage.learned_columns(scored)
    for name, rows in sampled_columns.items():
        advantaged = with_column(advantaged, name, _spread_over_sequences(sequences_by_rollout, rows))
    trained = np.flatnonzero(~batch.cut[batch.rows])
    return replace(
        batch,
        scored=scored,
        sequences=[advantaged[index] for index in trained],
        rows=batch.rows[trained],
        places=[batch.places[index] for index in trained],
    )


def _spread_over_sequences(
    sequences_by_rollout: Rows[Rows[TrainingSample]], rows: Rows[NDArray[np.floating[Any]]]
) -> list[NDArray[np.float32]]:
    """Return a column of every sequence, 0 at tokens that were not sampled.

    rows: for each rollout the numbers of its sampled tokens. They cover its sequences, one after the other.
    """
    columns = []
    for sequences, row in zip(sequences_by_rollout, rows):
        ends = np.cumsum([int(np.count_nonzero(sequence.mask)) for sequence in sequences])[:-1]
        for sequence, sampled_values in zip(sequences, np.split(row, ends)):
            columns.append(_spread_over_tokens(sequence.mask, sampled_values.astype(np.float32)))
    return columns


def _sampled_column(sequences_by_rollout: Rows[Rows[TrainingSample]], name: str) -> list[NDArray[np.float32]]:
    """Return a column at the sampled tokens of each rollout."""
    return [
        np.concatenate([sequence.columns[name][sequence.mask] for sequence in sequences])
        for sequences in sequences_by_rollout
    ]


def _restrict_outcomes(outcomes: TaskOutcomes, trained: set[str], filtered: Mapping[str, str]) -> TaskOutcomes:
    """Return the outcomes with only `trained` as trained; the others become filtered or dropped. filtered: id ->
    reason."""
    restricted = TaskOutcomes([task_id for task_id in outcomes.trained if task_id in trained])
    restricted.add(TaskOutcomes(filtered=outcomes.filtered, dropped=outcomes.dropped))
    for task_id in outcomes.trained:
        if task_id in filtered:
            restricted.filtered.setdefault(filtered[task_id], []).append(task_id)
        elif task_id not in trained:
            restricted.dropped.setdefault(NOT_FINITE, []).append(task_id)
    return restricted


def with_column(sequences: Rows[TrainingSample], name: str, values: Rows[NDArray[np.float32]]) -> list[TrainingSample]:
    """Return the sequences with one more column."""
    return [
        replace(sequence, columns={**sequence.columns, name: column}) for sequence, column in zip(sequences, values)
    ]


def training_sample(
    row: TrajectoryRow,
    advantage: float | None,
    version: int | None = None,
    rollout: int | None = None,
) -> TrainingSample:
    """Return a row to train on, with the columns "rollout_log_prob", "age" if a version is given, and "advantage".

    advantage: of every sampled token, or one number; None: no such column. rollout: see `TrainingSample`.
    """
    columns = {ROLLOUT_LOG_PROB.name: row.log_probs}
    if advantage is not None:
        columns[ADVANTAGE.name] = _spread_over_tokens(row.sampled, advantage)
    if version is not None:
        columns[AGE.name] = np.where(row.sampled, version - row.versions, 0).astype(np.float32)
    return TrainingSample(row.tokens, row.sampled, columns, rollout)


def _spread_over_tokens(sampled: NDArray[np.bool_], values: NDArray[np.float32] | float) -> NDArray[np.float32]:
    """Return the values of the sampled tokens at their positions, and 0 elsewhere. sampled: bool [T]."""
    column = np.zeros(len(sampled), np.float32)
    column[sampled] = values
    return column
