"""From sampled groups to training sequences: scores, advantages, and the one state in which each prompt ends.

Contract 2: every prompt drawn is trained, filtered (with the reason) or dropped (with the reason). Pure.
"""

from collections.abc import Container, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlctl.config.grpo_schema import GrpoSection
from rlctl.grpo.advantages import advantages
from rlctl.grpo.group_filter import is_cut, why_left_out, why_nothing
from rlctl.rollout.types import Rollout, RolloutGroup
from rlctl.training.micro_batching import TrainingSample

NOT_FINITE = "log-probs that are not finite"
Source = Literal["generator", "trainer", "reference"]


@dataclass
class TaskOutcomes:
    """Ids of the prompts by the state they ended in; reason -> ids for those that were not trained."""

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
    """A rollout that reaches no update: a log-prob of it is NaN or infinite."""

    prompt_id: str
    # Index in its group.
    rollout: int
    # Index among the tokens that were sampled.
    token: int
    # "nan", "inf" or "-inf".
    log_prob: str
    # Who computed it.
    source: Source

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt_id}, rollout {self.rollout}, token {self.token}: {self.log_prob} of the {self.source}"
        )


@dataclass(frozen=True)
class MaskedRollout:
    """A rollout that was cut and reaches no update (`grpo.overlong.mask`). It counts in its group's baseline."""

    # Index of its group.
    owner: int
    reward: float
    right: bool


@dataclass(frozen=True)
class TrainingBatch:
    """Sequences to train on, the group each belongs to (index into `groups`), and what became of the prompts.

    places: of each sequence, the prompt's id and the rollout's index in its group. left_out: rollouts that are not
    among the sequences, see `LeftOut`. rewards: float64, of each sequence's rollout; right: bool, whether it is right.
    masked: rollouts that are not among the sequences, but count in baselines.
    """

    sequences: list[TrainingSample]
    owners: NDArray[np.int64]
    outcomes: TaskOutcomes
    places: list[tuple[str, int]]
    left_out: list[LeftOut]
    rewards: NDArray[np.float64]
    right: NDArray[np.bool_]
    masked: list[MaskedRollout]

    @classmethod
    def joined(cls, parts: "Rows[TrainingBatch]", groups: Rows[int]) -> "TrainingBatch":
        """Return several batches as one. groups: number of groups of each."""
        outcomes = TaskOutcomes()
        for part in parts:
            outcomes.add(part.outcomes)
        starts = np.cumsum([0, *groups[:-1]])
        owners = np.concatenate([part.owners + start for part, start in zip(parts, starts)])
        sequences = [sequence for part in parts for sequence in part.sequences]
        places = [place for part in parts for place in part.places]
        left_out = [each for part in parts for each in part.left_out]
        rewards = np.concatenate([part.rewards for part in parts])
        right = np.concatenate([part.right for part in parts])
        masked = [
            replace(each, owner=each.owner + int(start)) for part, start in zip(parts, starts) for each in part.masked
        ]
        return cls(sequences, owners, outcomes, places, left_out, rewards, right, masked)

    def column(self, name: str) -> list[NDArray[np.float32]]:
        """Return one field of every sequence."""
        return [sequence.fields[name] for sequence in self.sequences]

    def shares(self, count: int) -> list[list[TrainingSample]]:
        """Return the sequences of `count` updates: whole groups, as even in number as possible, in drawing order."""
        groups = np.unique(self.owners)
        parts = [part for part in np.array_split(groups, count) if len(part)]
        return [[self.sequences[row] for row in np.flatnonzero(np.isin(self.owners, part))] for part in parts]


def make_batch(groups: Rows[RolloutGroup], config: GrpoSection, version: int | None = None) -> TrainingBatch:
    """Return the samples of groups, and the outcome of each task.

    Rollouts without a score, or with a log-prob that is not finite, are left out, and count in no baseline. A group
    left with none is dropped, one that teaches nothing may be filtered. Rollouts that were cut may be masked: they
    reach no update, but count in baselines.

    version: of the weights that are trained; then sequences tell how many steps old each token is.
    """
    outcomes, left_out = TaskOutcomes(), list[LeftOut]()
    rewards, owners, rollouts = list[float](), list[int](), list[Rollout]()
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
        rewards += [value for _, value in scored]
        owners += [index] * len(scored)
        rollouts += [rollout for rollout, _ in scored]
    owner_array, reward_array = np.array(owners, np.int64), np.array(rewards, np.float64)
    right_array = np.array([rollout.score is not None and rollout.score.right for rollout in rollouts], np.bool_)
    worth = advantages(reward_array, owner_array, config.advantage)
    samples = [training_sample(rollout, float(value), version) for rollout, value in zip(rollouts, worth)]
    places = [(rollout.id.task, rollout.id.index) for rollout in rollouts]
    batch = TrainingBatch(samples, owner_array, outcomes, places, left_out, reward_array, right_array, [])
    return _masked(batch, np.array([config.overlong.mask and is_cut(rollout) for rollout in rollouts], np.bool_))


def _masked(batch: TrainingBatch, cut: NDArray[np.bool_]) -> TrainingBatch:
    """Return the batch without the sequences that were cut, whose rewards it keeps. cut: of each sequence."""
    rows = np.flatnonzero(~cut)
    return replace(
        batch,
        sequences=[batch.sequences[row] for row in rows],
        owners=batch.owners[rows],
        places=[batch.places[row] for row in rows],
        rewards=batch.rewards[rows],
        right=batch.right[rows],
        masked=[
            MaskedRollout(int(batch.owners[row]), float(batch.rewards[row]), bool(batch.right[row]))
            for row in np.flatnonzero(cut)
        ],
    )


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
    """Return the rollouts that the generator gave a log-prob that is not finite, by their index."""
    found = {}
    for rollout in group.rollouts:
        if left_out := _left_out(group.task.id, rollout.id.index, rollout.log_probs, rollout.sampled, "generator"):
            found[rollout.id.index] = left_out
    return found


def _left_out(
    task: str, index: int, log_probs: NDArray[np.float32], sampled: NDArray[np.bool_], source: Source
) -> LeftOut | None:
    """Name the first sampled token whose log-prob is not finite. log_probs, sampled: [T] of a trajectory."""
    bad = np.flatnonzero(sampled & ~np.isfinite(log_probs))
    if not len(bad):
        return None
    return LeftOut(task, index, int(np.count_nonzero(sampled[: bad[0]])), str(float(log_probs[bad[0]])), source)


def add_log_probs(
    batch: TrainingBatch,
    columns: Rows[NDArray[np.float32]],
    source: Literal["trainer", "reference"],
    config: GrpoSection,
) -> TrainingBatch:
    """Return the batch with a field "proximal_log_prob" or "reference_log_prob".

    A rollout whose values are not finite is left out, as `make_batch` does with one of the generator: its reward
    counts in no baseline.
    """
    name = "proximal_log_prob" if source == "trainer" else "reference_log_prob"
    kept, left_out = [], list(batch.left_out)
    for row, (sequence, column) in enumerate(zip(batch.sequences, columns)):
        if bad := _left_out(*batch.places[row], column, sequence.mask, source):
            left_out.append(bad)
        else:
            kept.append(row)
    more = replace(batch, sequences=with_field(batch.sequences, name, columns), left_out=left_out)
    return _only(more, np.array(kept, np.int64), config) if len(kept) < len(batch.sequences) else more


def _only(batch: TrainingBatch, kept: NDArray[np.int64], config: GrpoSection) -> TrainingBatch:
    """Return the batch of these rows, with the advantages and outcomes that `make_batch` gives groups of them alone."""
    # Masked rollouts follow the sequences: they count in the baselines.
    values = np.append(batch.rewards[kept], [each.reward for each in batch.masked])
    right = np.append(batch.right[kept], np.array([each.right for each in batch.masked], np.bool_))
    owners = np.append(batch.owners[kept], np.array([each.owner for each in batch.masked], np.int64))
    reasons = {
        int(each): reason
        for each in np.unique(batch.owners[kept])
        if (
            reason := why_nothing(
                list(values[owners == each]), list(right[owners == each]), config.dynamic_sampling.filter
            )
        )
    }
    filtered = {batch.places[row][0]: reasons[owner] for row in kept if (owner := int(batch.owners[row])) in reasons}
    worth = advantages(values, owners, config.advantage)
    rows = [(row, value) for row, value in zip(kept, worth) if int(batch.owners[row]) not in reasons]
    sequences = [
        replace(one, fields={**one.fields, "advantage": np.where(one.mask, value, np.float32(0))})
        for one, value in ((batch.sequences[row], value) for row, value in rows)
    ]
    left = np.array([row for row, _ in rows], np.int64)
    places = [batch.places[row] for row in left]
    outcomes = _without(batch.outcomes, {name for name, _ in places}, filtered)
    taken = (batch.owners[left], outcomes, places, batch.left_out, batch.rewards[left], batch.right[left])
    return TrainingBatch(sequences, *taken, batch.masked)


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


def with_field(sequences: Rows[TrainingSample], name: str, columns: Rows[NDArray[np.float32]]) -> list[TrainingSample]:
    """Return the sequences with one more field."""
    return [replace(one, fields={**one.fields, name: column}) for one, column in zip(sequences, columns)]


def training_sample(rollout: Rollout, advantage: float, version: int | None = None) -> TrainingSample:
    """Return a rollout to train on, with fields "advantage" and "rollout_log_prob", and with a version "age"."""
    worth = np.where(rollout.sampled, np.float32(advantage), np.float32(0))
    fields = {"advantage": worth, "rollout_log_prob": rollout.log_probs}
    if version is not None:
        fields["age"] = np.where(rollout.sampled, version - rollout.versions, 0).astype(np.float32)
    return TrainingSample(rollout.tokens, rollout.sampled, fields)
