"""Turns of a rollout differ in length, and their lengths add up to the requested length."""

from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlctl.bench.generation import TurnLengths, turn_lengths
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest
from tests.virtual_events import VirtualEvents


def make_id(group: int, index: int) -> RolloutId:
    return RolloutId("train", f"r{group}", group, index)


@given(st.integers(0, 9999), st.integers(0, 63), st.integers(1, 40), st.integers(0, 4000), st.floats(0, 3))
def test_every_turn_has_a_token_and_all_have_the_rollouts(
    group: int, index: int, turns: int, further_tokens: int, spread: float
) -> None:
    tokens = turns + further_tokens
    lengths = turn_lengths(make_id(group, index), turns, tokens, spread)
    assert len(lengths) == turns and sum(lengths) == tokens and min(lengths) >= 1
    turn_lengths.cache_clear()
    assert turn_lengths(make_id(group, index), turns, tokens, spread) == lengths


def test_lengths_differ_by_the_spread_between_turns_and_between_rollouts() -> None:
    assert turn_lengths(make_id(0, 0), 8, 1024, 0.0) == (128,) * 8
    first_rollout = turn_lengths(make_id(0, 0), 8, 1024, 0.5)
    second_rollout = turn_lengths(make_id(0, 1), 8, 1024, 0.5)
    assert len(set(first_rollout)) > 1 and first_rollout != second_rollout
    narrow = turn_lengths(make_id(3, 0), 8, 1024, 0.1)
    wide = turn_lengths(make_id(3, 0), 8, 1024, 1.0)
    assert max(narrow) - min(narrow) < max(wide) - min(wide)


class RecordingEngines:
    """Stand-in for engines that records the requests."""

    def __init__(self) -> None:
        self.events = VirtualEvents()
        self.requests = list[TurnRequest]()
        self.finished_ids = list[RolloutId]()

    async def sample_turn(self, request: TurnRequest, *, ahead: bool = False, turns_follow: bool = False) -> Completion:
        self.requests.append(request)
        return Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")

    def finish(self, rollouts: Iterable[RolloutId]) -> None:
        self.finished_ids += rollouts


def test_engines_are_asked_for_each_turns_own_length() -> None:
    recorder = RecordingEngines()
    engines = TurnLengths(recorder, turns=4, spread=0.5, tokens=64)
    ids = [RequestId(make_id(5, 2), turn) for turn in range(4)]
    # The last turn's room may be less than the mean.
    for request_id in ids:
        request = TurnRequest(
            id=request_id,
            prompt_tokens=[7, 8],
            max_new_tokens=16 if request_id.turn < 3 else 9,
            temperature=1.0,
            seed=0,
        )
        engines.events.run(engines.sample_turn(request))
    lengths = tuple(request.max_new_tokens for request in recorder.requests)
    assert lengths == turn_lengths(make_id(5, 2), 4, 64, 0.5)
    assert [request.id for request in recorder.requests] == ids
    engines.finish([make_id(5, 2)])
    assert recorder.finished_ids == [make_id(5, 2)]
