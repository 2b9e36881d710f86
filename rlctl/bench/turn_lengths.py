"""Turns of drawn lengths that add up: answers of one length would all end, and all turns begin, in one engine step."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from rlctl.generation.requests import RequestId, RolloutId, TurnRequest
from rlctl.rollout.single_turn import Engines


@dataclass
class TurnLengths:
    """Engines, see `Engines`, that sample as many tokens in a rollout's turns together as they were asked for.

    Each request must be for a mean turn's tokens, or for what is left of a rollout.
    """

    engines: Engines
    turns: int
    # Standard deviation of the logarithm of what the lengths are proportional to. 0: all are the mean.
    spread: float
    # Tokens of a mean turn.
    mean: int

    def submit(self, requests: Sequence[TurnRequest], submitter: Any, *, ahead: bool = False) -> None:
        self.engines.submit([self._cut(request) for request in requests], submitter, ahead=ahead)

    def abort(self, ids: Collection[RequestId]) -> list[RequestId]:
        return self.engines.abort(ids)

    def _cut(self, request: TurnRequest) -> TurnRequest:
        lengths = turn_lengths(request.id.rollout, self.turns, self.turns * self.mean, self.spread)
        return replace(request, max_new_tokens=lengths[request.id.turn])


@lru_cache(maxsize=8192)
def turn_lengths(rollout: RolloutId, turns: int, tokens: int, spread: float) -> tuple[int, ...]:
    """Return the tokens of each turn of a rollout: at least 1, `tokens` in all, the same in each call."""
    weights = np.random.default_rng([rollout.group, rollout.index]).lognormal(0, spread, turns)
    # Each turn has one token; the others are shared out, rounded where the running sum is.
    ends = np.rint(np.cumsum(weights) / weights.sum() * (tokens - turns)).astype(int)
    return tuple((1 + np.diff(ends, prepend=0)).tolist())
