"""From sampled groups to training sequences: scores, advantages, and the one state in which each prompt ends.

Every drawn prompt is trained, filtered or dropped, the last two with the reason (contract 2). Pure.

A batch gets its advantages with the last column that they need: at once from `make_batch`, or from `add_column`.
"""

from collections.abc import Container, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rlctl.config.grpo_schema import GrpoSection
from rlctl.grpo.advantages.base import Advantage, ScoredRollouts, token_advantages
from rlctl.grpo.group_filter import why_left_out, why_nothing
from rlctl.preflight.declared_columns import ADVANTAGE, AGE, ROLLOUT_LOG_PROB
from rlctl.rollout.conversation import TrajectoryRow
from rlctl.rollout.types import Rollout, RolloutGroup
from rlctl.training.micro_batching import TrainingSample

NOT_FINITE = "log-probs that are not finite"


@dataclass
class TaskOutcomes:
    """Ids of the prompts by the state they ended in; reason -> ids for untrained prompts."""

    trained: list[str] = field(default_factory=list)
    filtered: dict[str, list[str]] = field(default_factory=dict)
    dropped: dict[str, list[str]] = field(default_factory=dict)

    def add(self, more: "TaskOutcomes") -> None:
        """Add the outcomes of another batch."""
        self.trained += more.trained
        for mine, theirs in ((self.filtered, more.filtered), (self.dropped, more.dropped)):
            for reason, ids in theirs.items():
                mine.setdefault(reason, []).extend(ids)


@dataclass(frozen=True)
class LeftOut:
    """A rollout that reaches no update: one of its log-probs is NaN or infinite."""

    prompt_id: str
    # Index in its group.
    rollout: int
    # Index among the tokens that were sampled.
    token: int
    # Name of the column, and its value there: "nan", "inf" or "-inf".
    column: str
    value: str

    def __str__(self) -> str:
        return f"prompt {self.prompt_id}, rollout {self.rollout}, token {self.token}: {self.column} is {self.value}"


@dataclass(frozen=True)
class TrainingBatch:
    """Sequences to train on, the rollouts behind their advantages, and the outcome of each prompt."""

    sequences: list[TrainingSample]
    # Rollouts that count in baselines; their `group` is the index into `groups`.
    scored: ScoredRollouts
    # bool [rollouts]: true for cut rollouts, which reach no update (`grpo.overlong.mask`). Their sequences are here
    # only until advantages that read columns are computed.
    cut: NDArray[np.bool_]
    # int64 [sequences]: the rollout of each, a row of `scored`.
    rows: NDArray[np.int64]
    outcomes: TaskOutcomes
    # Prompt's id and rollout's index in its group, of each sequence.
    places: list[tuple[str, int]]
    # Rollouts that are neither trained nor count in baselines.
    left_out: list[LeftOut]

    @classmethod
    def joined(cls, parts: "Rows[TrainingBatch]", groups: Rows[int]) -> "TrainingBatch":
        """Return several batches as one. groups: number of groups of each."""
        outcomes = TaskOutcomes()
        for part in parts:
            outcomes.add(part.outcomes)
        starts = np.cumsum([0, *groups[:-1]])
        scored = [replace(part.scored, group=part.scored.group + start) for part, start in zip(parts, starts)]
        cut = np.concatenate([part.cut for part in parts])
        firsts = np.cumsum([0, *map(len, scored[:-1])])
        rows = np.concatenate([part.rows + first for part, first in zip(parts, firsts)])
        sequences = [sequence for part in parts for sequence in part.sequences]
        places = [place for part in parts for place in part.places]
        left_out = [each for part in parts for each in part.left_out]
        return cls(sequences, ScoredRollouts.joined(scored), cut, rows, outcomes, places, left_out)

    @property
    def owners(self) -> NDArray[np.int64]:
        """Group of each sequence."""
        return self.scored.group[self.rows]

    def column(self, name: str) -> list[NDArray[np.float32]]:
        """Return one column of every sequence."""
        return [sequence.columns[name] for sequence in self.sequences]

    def shares(self, count: int) -> list[list[TrainingSample]]:
        """Return the sequences of `count` updates: whole groups, as even in number as possible, in drawing order."""
        groups = np.unique(self.owners)
        parts = [part for part in np.array_split(groups, count) if len(part)]
        return [[self.sequences[row] for row in np.flatnonzero(np.isin(self.owners, part))] for part in parts]


def make_batch(
    groups: Rows[RolloutGroup], config: GrpoSection, advantage: Advantage, version: int | None = None
) -> TrainingBatch:
    """Return the samples of groups, and the outcome of each task.

    Rollouts without a score, or with a log-prob that is not finite, are left out, and count in no baseline. A group
    left with none is dropped, one that teaches nothing may be filtered. Rollouts that were cut may be masked: they
    reach no update, but count in baselines.

    version: of the weights that are trained; then sequences tell how many steps old each token is. Without advantages,
    if these read columns that are computed: `add_column` brings both.
    """
    outcomes, left_out = TaskOutcomes(), list[LeftOut]()
    owners, rollouts = list[int](), list[Rollout]()
    for index, group in enumerate(groups):
        bad = _not_finite(group)
        left_out += bad.values()
        scored = _scored(group, bad)
        if not scored:
            why = NOT_FINITE if bad else "no rollout could be scored"
            outcomes.dropped.setdefault(why, []).append(group.task.id)
            continue
        if reason := why_left_out(scored, config):
            outcomes.filtered.setdefault(reason, []).append(group.task.id)
            continue
        outcomes.trained.append(group.task.id)
        owners += [index] * len(scored)
        rollouts += [rollout for rollout, _ in scored]
    cut = np.array([config.overlong.mask and rollout.is_cut for rollout in rollouts], np.bool_)
    rows, samples = list[int](), list[TrainingSample]()
    for index, rollout in enumerate(rollouts):
        if advantage.columns or not cut[index]:
            number = index if len(rollout.rows) > 1 else None
            samples += [training_sample(row, None, version, number) for row in rollout.rows]
            rows += [index] * len(rollout.rows)
    places = [(rollouts[row].id.task, rollouts[row].id.index) for row in rows]
    columns = ScoredRollouts.read(rollouts, owners)
    batch = TrainingBatch(samples, columns, cut, np.array(rows, np.int64), outcomes, places, left_out)
    return _with_advantages(batch, advantage)


def why_it_teaches_nothing(config: GrpoSection, group: RolloutGroup) -> str | None:
    """Return the reason for which another group is to be sampled in place of this one; None to keep it.

    A group without a rollout that was scored is kept: it is dropped, and counted among the failures.
    """
    scored = _scored(group, _not_finite(group))
    return why_left_out(scored, config) if scored and config.dynamic_sampling.filter else None


def is_uniform(group: RolloutGroup) -> bool:
    """Return whether the rollouts that `make_batch` leaves in have one reward."""
    return len({value for _, value in _scored(group, _not_finite(group))}) == 1


def _scored(group: RolloutGroup, bad: Container[int]) -> list[tuple[Rollout, float]]:
    """Return rollout and reward of each rollout that has one, without those at `bad`."""
    pairs = [(rollout, rollout.reward) for rollout in group.rollouts if rollout.id.index not in bad]
    return [(rollout, reward) for rollout, reward in pairs if reward is not None]


def _not_finite(group: RolloutGroup) -> dict[int, LeftOut]:
    """Return the rollouts with a log-prob of the generator that is not finite, by their index."""
    found = {}
    for rollout in group.rollouts:
        at = group.task.id, rollout.id.index
        if left_out := _left_out_rollout(*at, ROLLOUT_LOG_PROB.name, rollout.log_probs, rollout.sampled):
            found[rollout.id.index] = left_out
    return found


def _left_out_rollout(
    task: str, index: int, column: str, values: NDArray[np.float32], sampled: NDArray[np.bool_]
) -> LeftOut | None:
    """Name the first sampled token at which a column is not finite. values, sampled: [T] of a trajectory."""
    finite = np.isfinite(values)
    # As nearly always: an array fewer for each of a step's rollouts.
    if finite.all() or not len(bad := np.flatnonzero(sampled & ~finite)):
        return None
    return LeftOut(task, index, int(np.count_nonzero(sampled[: bad[0]])), column, str(float(values[bad[0]])))


def add_column(
    batch: TrainingBatch, name: str, values: Rows[NDArray[np.float32]], config: GrpoSection, advantage: Advantage
) -> TrainingBatch:
    """Return the batch with one more column, of values float32 [T] for each sequence, and the advantages it allows.

    A rollout whose values are not finite is left out, as `make_batch` does with one of the generator: its reward
    counts in no baseline.
    """
    found = dict[int, LeftOut]()
    for row, place, sequence, own in zip(batch.rows, batch.places, batch.sequences, values):
        if bad := _left_out_rollout(*place, name, own, sequence.mask):
            found.setdefault(int(row), bad)
    kept = np.flatnonzero(~np.isin(batch.rows, list(found)))
    sequences = with_column(batch.sequences, name, values)
    more = replace(batch, sequences=sequences, left_out=[*batch.left_out, *found.values()])
    if found:
        more = _select_sequences(more, kept, config)
    is_due = found or any(ADVANTAGE.name not in sequence.columns for sequence in more.sequences)
    return _with_advantages(more, advantage) if is_due else more


def _select_sequences(batch: TrainingBatch, kept: NDArray[np.int64], config: GrpoSection) -> TrainingBatch:
    """Return the batch of these sequences, with outcomes as `make_batch` would give."""
    scored, counts, reasons = batch.scored, np.ones(len(batch.scored), np.bool_), dict[int, str]()
    counts[np.delete(batch.rows, kept)] = False
    # A group all of whose sequences are left out has none but masked rollouts.
    trained = np.unique(scored.group[batch.rows[kept][~batch.cut[batch.rows[kept]]]])
    counts &= np.isin(scored.group, trained)
    for each in map(int, trained):
        members = counts & (scored.group == each)
        rewards, right = scored.reward[members].tolist(), scored.right[members].tolist()
        if reason := why_nothing(rewards, right, config.dynamic_sampling.filter):
            reasons[each] = reason
            counts &= ~members
    filtered = {batch.places[i][0]: reasons[owner] for i in kept if (owner := int(batch.owners[i])) in reasons}
    kept = kept[counts[batch.rows[kept]]]
    rows = (np.cumsum(counts) - 1)[batch.rows[kept]]
    sequences, places = [batch.sequences[i] for i in kept], [batch.places[i] for i in kept]
    outcomes = _without(batch.outcomes, {name for name, _ in places}, filtered)
    return TrainingBatch(sequences, scored.only(counts), batch.cut[counts], rows, outcomes, places, batch.left_out)


def _with_advantages(batch: TrainingBatch, advantage: Advantage) -> TrainingBatch:
    """Return the batch to train, with its advantages; unchanged while a column that they need is missing."""
    if any(name not in sequence.columns for sequence in batch.sequences for name in advantage.columns):
        return batch
    parts: list[list[TrainingSample]] = [[] for _ in range(len(batch.scored))]
    for sequence, row in zip(batch.sequences, batch.rows):
        parts[row].append(sequence)
    scored = batch.scored
    if not scored.columns:
        # From here on they are kept: the sequences of cut rollouts go below.
        scored = replace(scored, columns={name: _sampled_column(parts, name) for name in advantage.columns})
    worth = token_advantages(advantage, scored)
    # The sequences of a rollout share its advantages, one after the other.
    sequences = []
    for part, values in zip(parts, worth):
        ends = np.cumsum([int(np.count_nonzero(each.mask)) for each in part])[:-1]
        sequences += [
            replace(each, columns={**each.columns, ADVANTAGE.name: _at(each.mask, own)})
            for each, own in zip(part, np.split(values, ends))
        ]
    trained = np.flatnonzero(~batch.cut[batch.rows])
    return replace(
        batch,
        scored=scored,
        sequences=[sequences[i] for i in trained],
        rows=batch.rows[trained],
        places=[batch.places[i] for i in trained],
    )


def _sampled_column(parts: Rows[Rows[TrainingSample]], name: str) -> list[NDArray[np.float32]]:
    """Return a column at the sampled tokens of each rollout. parts: sequences of each."""
    return [np.concatenate([each.columns[name][each.mask] for each in part]) for part in parts]


def _without(outcomes: TaskOutcomes, left: set[str], filtered: Mapping[str, str]) -> TaskOutcomes:
    """Return the outcomes where trained prompts that are not `left` are filtered or dropped. filtered: id -> reason."""
    now = TaskOutcomes([name for name in outcomes.trained if name in left])
    now.add(TaskOutcomes(filtered=outcomes.filtered, dropped=outcomes.dropped))
    for name in outcomes.trained:
        if name in filtered:
            now.filtered.setdefault(filtered[name], []).append(name)
        elif name not in left:
            now.dropped.setdefault(NOT_FINITE, []).append(name)
    return now


def with_column(sequences: Rows[TrainingSample], name: str, values: Rows[NDArray[np.float32]]) -> list[TrainingSample]:
    """Return the sequences with one more column."""
    return [replace(one, columns={**one.columns, name: own}) for one, own in zip(sequences, values)]


def training_sample(
    row: TrajectoryRow,
    advantage: float | None,
    version: int | None = None,
    rollout: int | None = None,
) -> TrainingSample:
    """Return a row to train on, with columns "rollout_log_prob", with a version "age", and "advantage" unless None.

    advantage: of all sampled tokens. rollout: see `TrainingSample`.
    """
    columns = {ROLLOUT_LOG_PROB.name: row.log_probs}
    if advantage is not None:
        columns[ADVANTAGE.name] = _at(row.sampled, advantage)
    if version is not None:
        columns[AGE.name] = np.where(row.sampled, version - row.versions, 0).astype(np.float32)
    return TrainingSample(row.tokens, row.sampled, columns, rollout)


def _at(sampled: NDArray[np.bool_], values: NDArray[np.float32] | float) -> NDArray[np.float32]:
    """Return the values of the sampled tokens at their places, and 0 elsewhere. sampled: bool [T]."""
    column = np.zeros(len(sampled), np.float32)
    column[sampled] = values
    return column
