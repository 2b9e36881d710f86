"""`StepOutputs` passes a request's tokens on once, when the request ends, each token with its log-prob."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.generation.vllm.fast.step_outputs import StepOutputs


class Scheduler:
    """Scheduler that adds one token to each request. A step's rows are (request, token, log-prob, ends, counts).

    ends: True if the token ends the request. counts: False if the scheduler drops the token.
    """

    def update_from_output(self, scheduled: Any, sampled: Any) -> Any:
        assert sampled.logprobs is None
        outputs = [
            SimpleNamespace(
                request_id=name, new_token_ids=[token] if counts else [], finish_reason="stop" if ends else None
            )
            for name, token, _, ends, counts in scheduled
        ]
        return {0: SimpleNamespace(outputs=outputs)}


def make_state() -> Any:
    return SimpleNamespace(logprobs_processor=SimpleNamespace(logprobs=SimpleNamespace(logprobs=[])))


def step(scheduler: Any, rows: list[tuple[str, int, float, bool, bool]], several: bool = False) -> list[Any]:
    """Make one step and return the outputs that are passed on. The device's batch has the rows in another order."""
    order = sorted(rows, reverse=True)
    log_probs = np.array([[value, 0.0] for _, _, value, _, _ in order], np.float32).reshape(len(order), 2)
    lists = SimpleNamespace(logprobs=log_probs, cu_num_generated_tokens=[0] if several else None)
    index = {name: place for place, (name, *_) in enumerate(order)}
    sampled = SimpleNamespace(logprobs=lists, req_id_to_index=index)
    return list(scheduler.update_from_output(rows, sampled)[0].outputs)


def test_a_request_is_handed_on_once_with_all_of_its_tokens() -> None:
    scheduler = Scheduler()
    states = {"a": make_state(), "b": make_state()}
    StepOutputs(scheduler, states)
    assert step(scheduler, [("a", 5, -1.0, False, True), ("b", 6, -2.0, False, True)]) == []
    [ended] = step(scheduler, [("a", 7, -0.5, True, True), ("b", 8, -4.0, False, True)])
    assert (ended.request_id, ended.new_token_ids) == ("a", [5, 7])
    assert states["a"].logprobs_processor.logprobs.logprobs == [-1.0, -0.5]
    assert states["b"].logprobs_processor.logprobs.logprobs == []


def test_a_token_that_the_scheduler_drops_has_no_log_prob() -> None:
    scheduler = Scheduler()
    states = {"a": make_state()}
    StepOutputs(scheduler, states)
    step(scheduler, [("a", 5, -1.0, False, True)])
    step(scheduler, [("a", 6, -9.0, False, False)])
    [ended] = step(scheduler, [("a", 7, -3.0, True, True)])
    assert ended.new_token_ids == [5, 7]
    assert states["a"].logprobs_processor.logprobs.logprobs == [-1.0, -3.0]


def test_aborted_requests_are_forgotten() -> None:
    scheduler = Scheduler()
    states = {"a": make_state(), "b": make_state()}
    outputs = StepOutputs(scheduler, states)
    step(scheduler, [("a", 5, -1.0, False, True), ("b", 6, -2.0, False, True)])
    del states["b"]
    step(scheduler, [("a", 7, -1.0, False, True)])
    assert set(outputs._running) == {"a"}
    # An end that nobody waits for any more is handed on as it is.
    del states["a"]
    [ended] = step(scheduler, [("a", 8, -1.0, True, True)])
    assert ended.request_id == "a"


def test_several_tokens_a_step_are_refused_rather_than_mistaken() -> None:
    scheduler = Scheduler()
    StepOutputs(scheduler, {})
    with pytest.raises(AssertionError, match="several tokens in one step"):
        step(scheduler, [("a", 5, -1.0, False, True)], several=True)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    drops=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 9))),
)
def test_every_request_gets_its_own_tokens_in_order(lengths: list[int], drops: set[tuple[int, int]]) -> None:
    scheduler = Scheduler()
    states = {str(number): make_state() for number in range(len(lengths))}
    StepOutputs(scheduler, states)
    expected: dict[str, list[int]] = {name: [] for name in states}
    tokens_by_name = dict[str, list[int]]()
    step_number = 0
    while len(tokens_by_name) < len(lengths):
        rows = []
        for number, length in enumerate(lengths):
            name = str(number)
            counts = (number, step_number) not in drops
            if name in tokens_by_name or len(expected[name]) == length:
                continue
            token = 100 * number + step_number
            if counts:
                expected[name].append(token)
            rows.append((name, token, -float(token), counts and len(expected[name]) == length, counts))
        for ended in step(scheduler, rows):
            tokens_by_name[ended.request_id] = ended.new_token_ids
        step_number += 1
    assert tokens_by_name == expected
    for name, tokens in tokens_by_name.items():
        assert states[name].logprobs_processor.logprobs.logprobs == [-float(token) for token in tokens]
