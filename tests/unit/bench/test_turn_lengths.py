"""Turns of a rollout differ in length, and add up to the length that was asked for."""

from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlctl.bench.generation import TurnLengths, turn_lengths
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest
from tests.virtual_events import VirtualEvents


def rollout(group: int, index: int) -> RolloutId:
    return RolloutId("train", f"r{group}", group, index)


@given(st.integers(0, 9999), st.integers(0, 63), st.integers(1, 40), st.integers(0, 4000), st.floats(0, 3))
def test_every_turn_has_a_token_and_all_have_the_rollouts(
    group: int, index: int, turns: int, more: int, spread: float
) -> None:
    tokens = turns + more
    lengths = turn_lengths(rollout(group, index), turns, tokens, spread)
    assert len(lengths) == turns and sum(lengths) == tokens and min(lengths) >= 1
    turn_lengths.cache_clear()
    assert turn_lengths(rollout(group, index), turns, tokens, spread) == lengths


def test_lengths_differ_by_the_spread_between_turns_and_between_rollouts() -> None:
    assert turn_lengths(rollout(0, 0), 8, 1024, 0.0) == (128,) * 8
    first, other = (turn_lengths(rollout(0, index), 8, 1024, 0.5) for index in (0, 1))
    assert len({*first}) > 1 and first != other
    spans = [turn_lengths(rollout(3, 0), 8, 1024, spread) for spread in (0.1, 1.0)]
    assert max(spans[0]) - min(spans[0]) < max(spans[1]) - min(spans[1])


class Asked:
    """Engines that remember their requests."""

    def __init__(self) -> None:
        self.events = VirtualEvents()
        self.requests = list[TurnRequest]()
        self.finished = list[RolloutId]()

    async def sample_turn(self, request: TurnRequest, *, ahead: bool = False, turns_follow: bool = False) -> Completion:
        self.requests.append(request)
        return Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")

    def finish(self, rollouts: Iterable[RolloutId]) -> None:
        self.finished += rollouts


def test_engines_are_asked_for_each_turns_own_length() -> None:
    asked = Asked()
    engines = TurnLengths(asked, turns=4, spread=0.5, tokens=64)
    ids = [RequestId(rollout(5, 2), turn) for turn in range(4)]
    # The last turn's room may be less than the mean.
    for each in ids:
        engines.events.run(engines.sample_turn(TurnRequest(each, [7, 8], 16 if each.turn < 3 else 9, 1.0, 0)))
    assert tuple(each.max_new_tokens for each in asked.requests) == turn_lengths(rollout(5, 2), 4, 64, 0.5)
    assert [each.id for each in asked.requests] == ids
    engines.finish([rollout(5, 2)])
    assert asked.finished == [rollout(5, 2)]
