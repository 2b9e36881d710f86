"""Sequences are scored once by frozen models, begin before a step waits, and NaN stands where a model cannot score."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlctl.generation.requests import TOP_IDS, TOP_LOG_PROBS, Completion, ScoreRequest
from rlctl.rollout.frozen_scores import FrozenScores, GivenTokens
from rlctl.utils.event_loop import EventLoop

RUN: Any = SimpleNamespace(deadline_s=5.0, explain_after_s=5.0)
LONGEST = 8


class FakeDispatcher:
    """Scores each token with minus its id, at once."""

    def __init__(self) -> None:
        self.events = EventLoop("test")
        self.requests: list[ScoreRequest] = []
        self.has_lost = False
        self.repairs = 0

    async def sample_turn(self, request: ScoreRequest) -> Completion:
        self.requests.append(request)
        scored = np.array(request.tokens[request.start :], np.int32)
        ids = np.tile(np.arange(request.top, dtype=np.int32), (len(scored), 1))
        columns = {TOP_IDS: ids, TOP_LOG_PROBS: -scored[:, None] - ids.astype(np.float32)} if request.top else {}
        return Completion(scored, -scored.astype(np.float32), np.zeros(len(scored), np.int32), "length", columns)

    def repair(self) -> bool:
        self.repairs += 1
        self.has_lost = False
        return True

    def last_step(self) -> float:
        return self.events.now()

    def describe(self) -> str:
        return ""

    def close(self) -> None:
        self.events.close()


@pytest.fixture
def dispatcher() -> Iterator[FakeDispatcher]:
    dispatcher = FakeDispatcher()
    yield dispatcher
    dispatcher.close()


def scores_of(dispatcher: Any, max_age: int = 0, **options: Any) -> FrozenScores:
    options |= {"name": "teacher", "temperature": 0.7, "longest": LONGEST, "max_age": max_age}
    return FrozenScores(dispatcher, RUN, lambda *_, **__: None, **options)


def given(*tokens: int, start: int) -> GivenTokens:
    sampled = np.zeros(len(tokens), np.bool_)
    sampled[start:] = True
    return GivenTokens(np.array(tokens, np.int32), sampled)


def test_a_sequence_is_scored_once_from_its_first_sampled_token(dispatcher: FakeDispatcher) -> None:
    scores = scores_of(dispatcher)
    sequences = [given(3, 4, 5, 6, start=2), given(3, 4, 5, 6, start=2), given(3, 4, 5, 6, start=1)]
    scores.begin(sequences[:1])
    columns = scores.scores(sequences)
    assert [column.tolist() for column in columns] == [[0, 0, -5, -6], [0, 0, -5, -6], [0, -4, -5, -6]]
    assert [request.start for request in dispatcher.requests] == [2, 1]
    assert {request.temperature for request in dispatcher.requests} == {0.7}
    assert len({str(request.id) for request in dispatcher.requests}) == 2


def test_a_sequence_that_does_not_fit_has_no_number_and_the_others_do(dispatcher: FakeDispatcher) -> None:
    scores = scores_of(dispatcher)
    columns = scores.scores([given(*range(LONGEST + 1), start=3), given(*range(LONGEST), start=3)])
    assert np.isnan(columns[0][3:]).all() and not columns[0][:3].any()
    assert np.isfinite(columns[1]).all() and len(dispatcher.requests) == 1


def test_sequences_that_no_step_took_are_forgotten(dispatcher: FakeDispatcher) -> None:
    scores = scores_of(dispatcher, max_age=1)
    left = given(9, 9, start=1)
    scores.begin([left])
    for step in range(3):
        scores.scores([given(1, step, start=1)])
    scores.begin([left])
    assert len(dispatcher.requests) == 4, "kept for the largest age and two steps more"
    scores.scores([given(1, 7, start=1)])
    scores.scores([left])
    assert len(dispatcher.requests) == 6


def test_a_lost_engine_is_replaced_though_no_score_is_missing(dispatcher: FakeDispatcher) -> None:
    scores = scores_of(dispatcher)
    dispatcher.has_lost = True
    scores.scores([])
    assert dispatcher.repairs == 1


def test_the_likeliest_tokens_of_a_sequence_are_ids_with_log_probs(dispatcher: FakeDispatcher) -> None:
    scores = scores_of(dispatcher, top=2, num_tokens=30)
    whole, too_long = scores.scores([given(4, 5, 6, start=2), given(*range(LONGEST + 1), start=7)])
    assert whole.dtype == np.float32
    assert whole.tolist() == [[[0, 0], [0, 0]], [[0, 0], [0, 0]], [[0, -6], [1, -7]]]
    assert np.isnan(too_long[7:]).all() and not too_long[:7].any()
    [request] = dispatcher.requests
    assert (request.top, request.num_tokens) == (2, 30)
