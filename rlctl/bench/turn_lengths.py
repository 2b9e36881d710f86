"""Turns of drawn lengths that add up: answers of one length would all end, and all turns begin, in one engine step."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rlctl.generation.requests import Completion, RolloutId, TurnRequest
from rlctl.rollout.runner import Engines
from rlctl.utils.event_loop import EventLoop


@dataclass
class TurnLengths:
    """Engines that draw each turn's length, in place of the requested one, see `Engines`."""

    engines: Engines
    turns: int
    # Lengths are in the ratio of log-normal numbers, whose logarithm has this standard deviation. 0: all are equal.
    spread: float
    # Tokens of all turns of a rollout.
    tokens: int

    @property
    def events(self) -> EventLoop:
        return self.engines.events

    async def sample_turn(self, request: TurnRequest, *, ahead: bool = False, more: bool = False) -> Completion:
        return await self.engines.sample_turn(self._cut(request), ahead=ahead, more=more)

    def finish(self, rollouts: Iterable[RolloutId]) -> None:
        self.engines.finish(rollouts)

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
