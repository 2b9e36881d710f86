"""Requests in an engine: the exact version of each token; requests handed out, aborted, or failed."""

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.generation.vllm import active_requests
from rlctl.generation.vllm.active_requests import ActiveRequests, ActiveTurn
from tests.turns import turn, turns


@dataclass
class LogProbs:
    logprobs: list[float]


@dataclass
class Output:
    """Output of vLLM for one request."""

    token_ids: list[int]
    finish_reason: str = "stop"
    logprobs: LogProbs = field(default_factory=lambda: LogProbs([]))

    def __post_init__(self) -> None:
        self.logprobs = LogProbs([-0.5] * len(self.token_ids))


def begin_requests(*groups: int, version: int = 0) -> tuple[ActiveRequests, list[str]]:
    requests = ActiveRequests()
    return requests, requests.add(map(turn, groups), version)


def end_request(requests: ActiveRequests, name: str, length: int) -> list[int]:
    """End a request, and return the versions of its tokens."""
    requests.finish(name, Output([7] * length))
    (ended_turn,) = requests.collect(0.0)
    return ended_turn.completion().versions.tolist()


def test_a_rollout_that_sees_two_changes_carries_three_versions() -> None:
    requests, (first, second) = begin_requests(0, 1, version=4)
    requests.change([(first, 3), (second, 1)], version=5)
    requests.change([(first, 4)], version=6)
    assert end_request(requests, first, 6) == [4, 4, 4, 5, 6, 6]
    assert end_request(requests, second, 2) == [4, 5]


def test_a_change_at_the_last_token_and_before_the_first_leaves_one_version() -> None:
    requests, (name,) = begin_requests(0)
    requests.change([(name, 0)], version=1)
    requests.change([(name, 3)], version=2)
    assert end_request(requests, name, 3) == [1, 1, 1]


def test_a_token_in_flight_at_a_change_that_is_thrown_away_counts_for_nobody() -> None:
    requests, (name,) = begin_requests(0)
    requests.change([(name, 5)], version=1)
    assert end_request(requests, name, 4) == [0, 0, 0, 0]


def test_a_request_that_had_not_begun_begins_again_with_the_new_version() -> None:
    requests, (name,) = begin_requests(0)
    assert requests.restart(name, 1) == turn(0)
    requests.change([], version=1)
    assert end_request(requests, name, 2) == [1, 1]


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(0, 10))
def test_versions_never_fall_and_every_token_has_the_one_that_was_live(steps: list[int], rest: int) -> None:
    active_turn = ActiveTurn(turn(0), [(0, 0)])
    expected = list[int]()
    for version, tokens in enumerate(steps, 1):
        expected += [version - 1] * tokens
        active_turn.stretches.append((len(expected), version))
    expected += [len(steps)] * rest
    versions = active_turn.versions(len(expected))
    assert versions.dtype == np.int32
    assert versions.tolist() == expected


def test_an_aborted_request_is_forgotten_whether_it_ended_or_not_and_leaves_the_others() -> None:
    requests, names = begin_requests(0, 1, 2)
    requests.finish(names[0], Output([7]))
    assert requests.abort([turn(0).id, turn(1).id, turn(9).id]).keys() == set(names[:2])
    assert requests.collect(0.0) == []
    requests.change([(names[2], 1)], version=1)
    assert end_request(requests, names[2], 2) == [0, 1]


def test_a_request_is_sampled_once_at_a_time() -> None:
    requests, _ = begin_requests(0)
    for new_turns in ([turn(1), turn(0)], [turn(0), turn(1)], [turn(1), turn(1)]):
        with pytest.raises(ValueError, match=r"request train-[01]\.0#0@0 is being sampled already"):
            requests.add(new_turns, 0)
    # Nothing of such a call was added.
    assert requests.abort([turn(1).id]) == {}


def test_answers_are_handed_out_once_without_waiting_for_their_group() -> None:
    requests = ActiveRequests()
    names = requests.add(turns(0, 3, [1], 8), 0)
    requests.finish(names[1], Output([5, 6], "length"))
    (ended_turn,) = requests.collect(1.0)
    assert (ended_turn.request.id.rollout.index, ended_turn.completion().finish) == (1, "length")
    assert requests.collect(0.0) == []
    assert requests


@pytest.mark.parametrize(("waiting", "together"), [(99, 10), (7, 3), (1, 1), (0, 1)])
def test_answers_gather_while_requests_enough_wait_in_the_engine(
    waiting: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_requests, "GATHER_S", 0.0)
    requests, names = begin_requests(*range(14))
    requests.finish(names[0], Output([7]))
    to_end = iter(names[1:])

    def look() -> int:
        """Return the number of waiting requests. Another request ends meanwhile."""
        requests.finish(next(to_end), Output([7]))
        return waiting

    # Each look sees one answer more; the tenth is the last.
    assert len(requests.collect(0.0, look)) == 1 + together
    assert requests
    # Two waiting requests are enough.
    monkeypatch.setattr(active_requests, "ENOUGH", 2)
    requests, names = begin_requests(*range(4))
    requests.finish(names[0], Output([7]))
    to_end = iter(names[1:])
    assert len(requests.collect(0.0, look)) == 2


def test_a_failure_ends_what_runs_and_whoever_collects_learns_of_it() -> None:
    requests, (name, _) = begin_requests(0, 1)
    requests.finish(name, Output([7]))
    requests.fail(RuntimeError("vLLM failed in a step"))
    assert not requests
    with pytest.raises(RuntimeError, match="failed in a step"):
        requests.collect(0.0)


def test_whoever_collects_is_woken_by_an_answer_and_waits_no_longer_where_nothing_else_runs() -> None:
    requests, (name,) = begin_requests(0)
    ended_turns: list[Any] = []
    thread = threading.Thread(target=lambda: ended_turns.extend(requests.collect(3000.0)), daemon=True)
    thread.start()
    requests.finish(name, Output([7]))
    # The thread would wait for 3,000 s.
    thread.join(300.0)
    assert len(ended_turns) == 1 and not thread.is_alive()
