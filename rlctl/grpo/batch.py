"""From sampled groups to training sequences: scores, advantages, and the one state in which each prompt ends.

Contract 2: every prompt drawn is trained, filtered (with the reason) or dropped (with the reason). Pure.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlctl.config.schema import GrpoSection
from rlctl.data.prompts import Prompt
from rlctl.generation.requests import Completion
from rlctl.grpo.advantages import advantages
from rlctl.rewards.scorer import Score
from rlctl.training.sequences import Sequence


@dataclass(frozen=True)
class Group:
    """A prompt's rollouts and their scores, side by side."""

    prompt: Prompt
    completions: list[Completion]
    scores: list[Score]


@dataclass
class Fates:
    """Ids of the prompts by the state they ended in; reason -> ids for those that were not trained."""

    trained: list[str] = field(default_factory=list)
    filtered: dict[str, list[str]] = field(default_factory=dict)
    dropped: dict[str, list[str]] = field(default_factory=dict)

    def add(self, more: "Fates") -> None:
        """Those of another batch too."""
        self.trained += more.trained
        for mine, theirs in ((self.filtered, more.filtered), (self.dropped, more.dropped)):
            for reason, ids in theirs.items():
                mine.setdefault(reason, []).extend(ids)


@dataclass(frozen=True)
class Batch:
    """Sequences to train on, the group each belongs to (index into `groups`), and what became of the prompts."""

    sequences: list[Sequence]
    owners: NDArray[np.int64]
    fates: Fates

    @classmethod
    def joined(cls, parts: "Rows[Batch]", groups: Rows[int]) -> "Batch":
        """Several batches as one. groups: how many each was made of."""
        fates = Fates()
        for part in parts:
            fates.add(part.fates)
        starts = np.cumsum([0, *groups[:-1]])
        owners = np.concatenate([part.owners + start for part, start in zip(parts, starts)])
        return cls([sequence for part in parts for sequence in part.sequences], owners, fates)

    def shares(self, count: int) -> list[list[Sequence]]:
        """The sequences of `count` updates: whole groups, as even in number as can be, in drawing order."""
        groups = np.unique(self.owners)
        parts = [part for part in np.array_split(groups, count) if len(part)]
        return [[self.sequences[row] for row in np.flatnonzero(np.isin(self.owners, part))] for part in parts]


def make_batch(groups: Rows[Group], config: GrpoSection, version: int | None = None) -> Batch:
    """Rollouts without a score are left out; a group left with none is dropped, a uniform one may be filtered.

    version: of the weights that are trained; then sequences tell how many steps old each token is.
    """
    fates = Fates()
    rewards, owners, completions = [], [], []
    for index, group in enumerate(groups):
        scored = [(c, s.value) for c, s in zip(group.completions, group.scores) if s.value is not None]
        values = [value for _, value in scored]
        if not scored:
            fates.dropped.setdefault("no rollout could be scored", []).append(group.prompt.id)
            continue
        if config.skip_uniform_groups and max(values) == min(values):
            fates.filtered.setdefault("all rewards equal", []).append(group.prompt.id)
            continue
        fates.trained.append(group.prompt.id)
        rewards += values
        owners += [index] * len(scored)
        completions += [completion for completion, _ in scored]
    owner_array = np.array(owners, np.int64)
    worth = advantages(np.array(rewards, np.float64), owner_array, config.advantage) if owners else np.zeros(0)
    rows = zip(owners, completions, worth)
    sequences = [to_sequence(groups[owner].prompt, one, float(value), version) for owner, one, value in rows]
    return Batch(sequences, owner_array, fates)


def with_field(sequences: Rows[Sequence], name: str, columns: Rows[NDArray[np.float32]]) -> list[Sequence]:
    """The sequences with one more field."""
    return [Sequence(s.tokens, s.mask, {**s.fields, name: column}) for s, column in zip(sequences, columns)]


def to_sequence(prompt: Prompt, completion: Completion, advantage: float, version: int | None = None) -> Sequence:
    """A rollout to train on, with fields "advantage" and "behaviour_log_prob", and with a version "age"."""
    start, length = len(prompt.tokens), len(prompt.tokens) + len(completion.tokens)
    tokens = np.empty(length, np.int32)
    tokens[:start], tokens[start:] = prompt.tokens, completion.tokens
    mask = np.arange(length) >= start
    behaviour = np.zeros(length, np.float32)
    behaviour[start:] = completion.log_probs
    worth = np.where(mask, np.float32(advantage), np.float32(0))
    fields = {"advantage": worth, "behaviour_log_prob": behaviour}
    if version is not None:
        fields["age"] = np.zeros(length, np.float32)
        fields["age"][start:] = version - completion.versions
    return Sequence(tokens, mask, fields)
