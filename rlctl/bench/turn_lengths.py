"""Turns of drawn lengths that add up: answers of one length would all end, and all turns begin, in one engine step."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from rlctl.generation.requests import RequestId, RolloutId, TurnRequest
from rlctl.rollout.runner import Engines


@dataclass
class TurnLengths:
    """Engines that draw each turn's length, in place of the requested one, see `Engines`."""

    engines: Engines
    turns: int
    # Lengths are in the ratio of log-normal numbers, whose logarithm has this standard deviation. 0: all are equal.
    spread: float
    # Tokens of all turns of a rollout.
    tokens: int

    def submit(
        self, requests: Sequence[TurnRequest], submitter: Any, *, ahead: bool = False, more: bool = False
    ) -> None:
        self.engines.submit([self._cut(request) for request in requests], submitter, ahead=ahead, more=more)

    def finish(self, rollouts: Collection[RolloutId]) -> None:
        self.engines.finish(rollouts)

    def abort(self, ids: Collection[RequestId]) -> list[RequestId]:
        return self.engines.abort(ids)

    def _cut(self, request: TurnRequest) -> TurnRequest:
        lengths = turn_lengths(request.id.rollout, self.turns, self.tokens, self.spread)
        return replace(request, max_new_tokens=lengths[request.id.turn])


@lru_cache(maxsize=8192)
def turn_lengths(rollout: RolloutId, turns: int, tokens: int, spread: float) -> tuple[int, ...]:
    """Return the tokens of each turn of a rollout: at least 1, their sum is `tokens`, the same in each call."""
    weights = np.random.default_rng([rollout.group, rollout.index]).lognormal(0, spread, turns)
    # Each turn has one token. The others are shared out; their running sum is rounded, so that none is lost.
    ends = np.rint(np.cumsum(weights) / weights.sum() * (tokens - turns)).astype(int)
    return tuple((1 + np.diff(ends, prepend=0)).tolist())
