"""Requests to an engine, and its answers. Both contain tokens, never text.

A request is one turn of one rollout, or given tokens to score. Answers are sent between processes as a few large arrays
(`PackedCompletions`), not as thousands of small ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Finish = Literal["stop", "length", "abort"]
FINISHES: tuple[Finish, ...] = ("stop", "length", "abort")
# parity: trainer and engine are compared, so the engine samples from the whole distribution, without top_p and top_k.
Purpose = Literal["train", "validation", "parity"]
# Number of each purpose's stream of seeds, so that no two purposes share seeds. Resampled groups have another stream.
_STREAMS: dict[Purpose, int] = {"train": 0, "validation": 1, "parity": 2}
_RESAMPLED = 3
# Further columns of a scored request: int32 [n, k] token ids, and float32 [n, k] their log-probs.
TOP_IDS = "top_ids"
TOP_LOG_PROBS = "top_log_probs"
# Further column of a request to an engine with `EngineSpec.values`: float32 [n], where n is 1.
VALUE = "value"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class RolloutId:
    """Identity of one attempt at a task. A rollout's seed is a function of this identity and the run's seed."""

    purpose: Purpose
    # Id of the drawn task, for example e0-r17: epoch and row.
    task: str
    # Number of the group. In training: the number of the task's draw. Otherwise: version * groups_per_step + index of
    # the task.
    group: int
    # Index of the rollout in its group.
    index: int
    # Number of times that the group was resampled on purpose, not because an engine was lost.
    attempt: int = 0

    @property
    def siblings(self) -> tuple[Purpose, int, int]:
        """Key that is equal for all rollouts of a group."""
        return self.purpose, self.group, self.attempt


@dataclass(frozen=True, slots=True)
class RequestId:
    """Identity of a request: one turn of a rollout."""

    rollout: RolloutId
    turn: int = 0

    def __str__(self) -> str:
        """Return the id as a string for vLLM, such as `train-12.0#3@0`: purpose, group, attempt, index, turn."""
        rollout = self.rollout
        return f"{rollout.purpose}-{rollout.group}.{rollout.attempt}#{rollout.index}@{self.turn}"


def rollout_seed(run_seed: int, rollout: RolloutId, groups_per_step: int) -> int:
    """Return the seed of a rollout, below 2^31. It is the same after a resume.

    Seeds of groups are drawn together for each step: group number g belongs to step g // groups_per_step. The rollouts
    of a group have consecutive seeds.
    """
    step, place = divmod(rollout.group, groups_per_step)
    stream = _RESAMPLED if rollout.attempt else _STREAMS[rollout.purpose]
    return _group_seeds(run_seed, stream, step + (rollout.purpose == "train"), groups_per_step)[place] + rollout.index


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a rollout's turn, below 2^31. seed: the rollout's seed, which turn 0 uses unchanged."""
    return int(np.random.SeedSequence([seed, turn]).generate_state(1, np.uint32)[0] >> 2) if turn else seed


@lru_cache(maxsize=16)
def _group_seeds(run_seed: int, stream: int, step: int, count: int) -> list[int]:
    numbers = np.random.SeedSequence([run_seed, stream, step]).generate_state(count, np.uint32)
    return [int(number >> 2) for number in numbers]


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn to sample. Temperature 0 is greedy. Otherwise the sampled tokens depend on the seed and the weights, not
    on other requests.
    """

    id: RequestId
    prompt_tokens: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    # Tokens that end this turn, besides `EngineSpec.stop_token_ids`, which end every turn.
    stops: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class ScoreRequest:
    """Given tokens whose log-probs an engine computes; it samples none.

    The log-prob of `tokens[i]` follows from the tokens before it. `start` to the last token are scored: n tokens.
    """

    id: RequestId
    tokens: list[int]
    # Index of the first scored token, at least 1.
    start: int
    # int32 [n, k]: token ids whose log-probs are wanted at each scored place; None: none.
    ids: NDArray[np.int32] | None = None
    # Number of likeliest tokens wanted at each scored place. 0 if `ids` are given.
    top: int = 0
    # Divides the logits; above 0.
    temperature: float = 1.0
    # Number of tokens of the distribution: logits of larger ids are padding, and left out. A given token may be padding
    # too, and then has log-prob -inf. None: there is no padding.
    num_tokens: int | None = None

    def check_value(self, longest: int, vocab: int) -> None:
        """Raise ValueError as `check`, for an engine with `EngineSpec.values`: only the last token has a value."""
        self.check(longest, vocab)
        if self.start != len(self.tokens) - 1 or self.top or self.ids is not None:
            raise ValueError(f"request {self.id}: an engine values the last token alone, without top and ids")

    def check(self, longest: int, vocab: int) -> None:
        """Raise ValueError if the request is malformed or does not fit. longest: most tokens. vocab: number of ids."""
        length = len(self.tokens)
        if not 1 <= self.start < length:
            raise ValueError(f"request {self.id}: start={self.start} must be from 1 to {length - 1}, the last token")
        if length > longest:
            raise ValueError(f"request {self.id} has {length} tokens, the engine's longest sequence is {longest}")
        if self.temperature <= 0:
            raise ValueError(f"request {self.id}: temperature={self.temperature} must be above 0")
        if not 0 <= self.top <= vocab or (self.top and self.ids is not None):
            raise ValueError(f"request {self.id}: top={self.top} must be from 0 to {vocab}, and 0 with ids")
        if not 0 <= min(self.tokens) <= max(self.tokens) < vocab:
            raise ValueError(f"request {self.id} has a token outside the vocabulary of {vocab}")
        if self.ids is None:
            return
        if self.ids.ndim != 2 or len(self.ids) != length - self.start:
            raise ValueError(f"request {self.id}: ids has shape {self.ids.shape}, not [{length - self.start}, k]")
        if self.ids.size and not 0 <= self.ids.min() <= self.ids.max() < vocab:
            raise ValueError(f"request {self.id} has an id outside the vocabulary of {vocab}")


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled turn of n tokens, or the n scored tokens of a `ScoreRequest`."""

    # int32 [n], including the stop token.
    tokens: NDArray[np.int32]
    # float32 [n], log-probs under the distribution that was sampled from (after temperature, top-k, top-p). Of scored
    # tokens: the column `log_prob`, or 0 if the engine values them.
    log_probs: NDArray[np.float32]
    # int32 [n], the weight version that sampled or scored each token.
    versions: NDArray[np.int32]
    finish: Finish
    # Further columns by name, [n, ...] each.
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def shorten(self, length: int) -> "Completion":
        """Return the first `length` tokens as a turn that ended there; the turn itself if these are all."""
        if length == len(self.tokens):
            return self
        columns = {name: values[:length] for name, values in self.columns.items()}
        return Completion(self.tokens[:length], self.log_probs[:length], self.versions[:length], "stop", columns)


def token_versions(stretches: Sequence[tuple[int, int]], length: int) -> NDArray[np.int32]:
    """Return the weight version of each of `length` tokens, int32 [length].

    stretches: ascending pairs (index of the first token with this version, version).
    """
    starts = [min(start, length) for start, _ in stretches] + [length]
    return np.repeat(np.array([version for _, version in stretches], np.int32), np.diff(starts))


@dataclass(frozen=True)
class PackedColumn:
    """One further column, of the completions that have the column with this shape."""

    name: str
    # Indices of these completions, ascending.
    owners: list[int]
    # [sum of their lengths, ...].
    values: NDArray[Any]


@dataclass(frozen=True)
class PackedCompletions:
    """Completions as columns: one array for each kind of value."""

    # int32 [completions], number of tokens of each completion.
    lengths: NDArray[np.int32]
    # Columns of shape [sum of lengths], with the dtypes of `Completion`.
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    versions: NDArray[np.int32]
    # int8 [completions], index into FINISHES.
    finishes: NDArray[np.int8]
    further: Sequence[PackedColumn] = ()

    @classmethod
    def pack(cls, completions: Sequence[Completion]) -> "PackedCompletions":
        """Return the columns of `completions`."""
        empty = Completion(
            tokens=np.zeros(0, np.int32),
            log_probs=np.zeros(0, np.float32),
            versions=np.zeros(0, np.int32),
            finish="stop",
        )
        # Without completions take an empty one, because `np.concatenate` refuses an empty list.
        rows = completions or [empty]
        return cls(
            lengths=np.array([len(completion.tokens) for completion in completions], np.int32),
            tokens=np.concatenate([row.tokens for row in rows]),
            log_probs=np.concatenate([row.log_probs for row in rows]),
            versions=np.concatenate([row.versions for row in rows]),
            finishes=np.array([FINISHES.index(completion.finish) for completion in completions], np.int8),
            further=_pack_columns(completions),
        )

    def unpack(self) -> list[Completion]:
        """Return the completions; their arrays are views of the columns."""
        ends = np.cumsum(self.lengths).tolist()
        starts = [0, *ends[:-1]]
        columns = self._unpack_columns()
        return [
            Completion(
                self.tokens[start:end],
                self.log_probs[start:end],
                self.versions[start:end],
                FINISHES[finish],
                columns.get(index, {}),
            )
            for index, (start, end, finish) in enumerate(zip(starts, ends, self.finishes.tolist()))
        ]

    def _unpack_columns(self) -> dict[int, dict[str, NDArray[Any]]]:
        """Return the further columns of each completion that has any, by its index."""
        columns: dict[int, dict[str, NDArray[Any]]] = {}
        for column in self.further:
            parts = np.split(column.values, np.cumsum(self.lengths[column.owners])[:-1])
            for owner, part in zip(column.owners, parts):
                columns.setdefault(owner, {})[column.name] = part
        return columns


def _pack_columns(completions: Sequence[Completion]) -> list[PackedColumn]:
    """Return the further columns of completions. Columns of one name with other shapes are apart."""
    owners: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for index, completion in enumerate(completions):
        for name, values in completion.columns.items():
            owners.setdefault((name, values.shape[1:]), []).append(index)
    return [
        PackedColumn(name, indices, np.concatenate([completions[index].columns[name] for index in indices]))
        for (name, _), indices in owners.items()
    ]
