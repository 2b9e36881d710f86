"""The groups that an engine is sampling: each rollout is a request of its own to vLLM, a group is done with its last.

Pure bookkeeping, but for the futures that callers wait on.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.generation.requests import FINISHES, PackedRollouts, TurnRequest


class Cancelled(RuntimeError):
    """A request was ended before it was done."""


@dataclass(frozen=True)
class EngineStats:
    """Since the engine's start. busy: seconds spent in steps. paused: seconds in which weights changed and nothing
    could be sampled. tokens: sampled, one a step for each sequence in it. steps: taken. at: when this was read, seconds
    of the engine's own clock.
    """

    busy: float = 0.0
    paused: float = 0.0
    tokens: int = 0
    steps: int = 0
    at: float = field(default=0.0, compare=False)

    def worked(self, seconds: float, sequences: int) -> "EngineStats":
        """After a step."""
        return replace(self, busy=self.busy + seconds, tokens=self.tokens + sequences, steps=self.steps + 1)

    def stood(self, seconds: float) -> "EngineStats":
        """After a change of weights."""
        return replace(self, paused=self.paused + seconds)


# Steps before the change that tell the ordinary gap.
_BEFORE = 64


def stall(steps: list[float], begin: float, end: float) -> float:
    """Return what a change of weights in [begin, end] costs running requests: seconds of the longest gap between two
    steps that touches it, beyond the median gap before it.

    steps: ascending times; 0 where nothing was sampled before or after.
    """
    gaps = [(first, last) for first, last in pairwise(steps) if last > begin and first < end]
    before = [last - first for first, last in pairwise([step for step in steps if step <= begin][-_BEFORE:])]
    if not gaps or not before:
        return 0.0
    return max(0.0, max(last - first for first, last in gaps) - median(before))


@dataclass(frozen=True)
class SampledTokens:
    """What vLLM gave for one rollout, and the version of each of its tokens, int32 [n]."""

    output: Any
    versions: NDArray[np.int32]


@dataclass
class TokenVersions:
    """Which weight version sampled which token of a running rollout: counted at every change of weights, so exact.

    The engine says who runs and how many tokens each has when the weights change.
    """

    _of: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def begin(self, rollout: str, version: int) -> None:
        """A rollout enters while `version` is live."""
        self._of[rollout] = [(0, version)]

    def change(self, running: Iterable[tuple[str, int]], version: int) -> None:
        """`version` became live. running: (rollout, tokens sampled so far) of every one not yet ended."""
        for rollout, tokens in running:
            self._of[rollout].append((tokens, version))

    def forget(self, rollout: str) -> None:
        """A rollout ended without an answer."""
        self._of.pop(rollout, None)

    def end(self, rollout: str, length: int) -> NDArray[np.int32]:
        """A rollout ended with this many tokens: the version of each, int32 [length]."""
        spans = self._of.pop(rollout)
        starts = [min(start, length) for start, _ in spans] + [length]
        versions = np.array([version for _, version in spans], np.int32)
        return np.repeat(versions, np.diff(starts))


@dataclass(frozen=True)
class FinishedGroups:
    """What an engine hands out at a time. ids, columns: groups that ended, and their rollouts. ended: of each group
    that still runs, how many of its rollouts do not any more.
    """

    ids: list[str]
    columns: PackedRollouts
    counters: EngineStats
    ended: dict[str, int]


@dataclass
class ActiveGroup:
    """A request under way. done: resolves to its samples, in order."""

    request: TurnRequest
    done: "Future[list[SampledTokens]]" = field(default_factory=Future)
    samples: dict[int, SampledTokens] = field(default_factory=dict)

    def rollouts(self) -> list[str]:
        """Names of its rollouts."""
        return [f"{self.request.id}#{index}" for index in range(self.request.num_samples)]


class ActiveRequests:
    """All groups of an engine."""

    def __init__(self) -> None:
        self._groups: dict[str, ActiveGroup] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Any:
        return iter(self._groups.values())

    def add(self, request: TurnRequest) -> ActiveGroup:
        """A new group. Raises ValueError if one of that id is being sampled."""
        if request.id in self._groups:
            raise ValueError(f"request {request.id} is being sampled already")
        self._groups[request.id] = ActiveGroup(request)
        return self._groups[request.id]

    def finish(self, rollout: str, sample: SampledTokens) -> int:
        """One rollout ended; with the last of its group the group is done. Returns the size of the group."""
        name, _, index = rollout.rpartition("#")
        group = self._groups[name]
        group.samples[int(index)] = sample
        if len(group.samples) == group.request.num_samples:
            del self._groups[name]
            group.done.set_result([group.samples[i] for i in range(group.request.num_samples)])
        return group.request.num_samples

    def drop(self, names: list[str], reason: Exception) -> list[str]:
        """These groups end without an answer, as far as they run; returns their rollouts."""
        found = [self._groups.pop(name) for name in names if name in self._groups]
        for group in found:
            group.done.set_exception(reason)
        return [rollout for group in found for rollout in group.rollouts()]

    def ended(self) -> dict[str, int]:
        """Rollouts that ended of each group that still runs, where there are any."""
        return {name: len(group.samples) for name, group in self._groups.items() if group.samples}

    def names(self) -> list[str]:
        """Ids of all groups."""
        return list(self._groups)


def columns(groups: list[list[SampledTokens]]) -> PackedRollouts:
    """The answers of several groups, as they travel."""
    samples = [sample for group in groups for sample in group]
    if not samples:
        nothing = np.zeros(0, np.int32)
        return PackedRollouts(nothing, nothing, np.zeros(0, np.float32), nothing, np.zeros(0, np.int8))
    outputs = [sample.output for sample in samples]
    lengths = np.array([len(output.token_ids) for output in outputs], np.int32)
    tokens = [np.asarray(output.token_ids, np.int32) for output in outputs]
    log_probs = [np.asarray(output.logprobs.logprobs, np.float32) for output in outputs]
    finishes = [FINISHES.index(output.finish_reason) for output in outputs]
    versions = np.concatenate([sample.versions for sample in samples])
    return PackedRollouts(
        lengths, np.concatenate(tokens), np.concatenate(log_probs), versions, np.array(finishes, np.int8)
    )
