"""Sharing requests out over engines, and reading completions back from columns."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlctl.generation.pool import GeneratorPool, share_out
from rlctl.generation.requests import FINISHES, PackedRollouts, TurnRequest
from rlctl.workers.errors import WorkerTimeout

requests = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 8), st.integers(1, 64)), max_size=40).map(
    lambda rows: [TurnRequest(f"r{i}", [1] * p, n, t, 1.0, i) for i, (p, n, t) in enumerate(rows)]
)


@given(requests, st.integers(1, 5))
def test_every_request_goes_to_one_engine_and_loads_are_even(batch: list[TurnRequest], engines: int) -> None:
    shares = share_out(batch, engines)
    assert len(shares) == engines
    assert sorted(request.id for share in shares for request in share) == sorted(request.id for request in batch)
    loads = [sum(request.cost for request in share) for share in shares]
    assert max(loads) - min(loads) <= max((request.cost for request in batch), default=0)
    assert shares == share_out(batch, engines)


@given(requests, st.integers(1, 5))
def test_an_engine_keeps_the_order_of_its_requests(batch: list[TurnRequest], engines: int) -> None:
    places = {request.id: place for place, request in enumerate(batch)}
    for share in share_out(batch, engines):
        order = [places[request.id] for request in share]
        assert order == sorted(order)


@given(requests, st.integers(1, 5))
def test_the_busiest_engine_is_within_one_request_of_the_mean(batch: list[TurnRequest], engines: int) -> None:
    # List scheduling (Graham 1966): at most mean + (1 - 1/m) of the costliest request.
    costs = [request.cost for request in batch]
    busiest = max(sum(request.cost for request in share) for share in share_out(batch, engines))
    assert busiest * engines <= sum(costs) + (engines - 1) * max(costs, default=0)


def test_more_engines_than_requests_leave_some_idle() -> None:
    batch = [TurnRequest("a", [1], 1, 4, 1.0, 0)]
    assert share_out(batch, 3) == [batch, [], []]


def test_a_request_costs_its_prompt_once_and_every_rollout_in_full() -> None:
    assert TurnRequest("a", [1] * 100, 4, 50, 1.0, 0).cost == 300


@given(requests, st.data())
def test_columns_give_each_request_its_own_rollouts_whole(batch: list[TurnRequest], data: st.DataObject) -> None:
    rollouts = sum(request.num_samples for request in batch)
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=rollouts, max_size=rollouts))
    owners = np.repeat(np.arange(rollouts), lengths)
    columns = PackedRollouts(
        lengths=np.array(lengths, np.int32),
        tokens=owners.astype(np.int32),
        log_probs=-owners.astype(np.float32),
        versions=2 * owners.astype(np.int32),
        finishes=np.array([row % 3 for row in range(rollouts)], np.int8),
    )
    groups = columns.split(batch)
    assert [len(group) for group in groups] == [request.num_samples for request in batch]
    flat = [completion for group in groups for completion in group]
    assert [completion.request_id for completion in flat] == [r.id for r in batch for _ in range(r.num_samples)]
    for row, (completion, length) in enumerate(zip(flat, lengths)):
        assert completion.tokens.tolist() == [row] * length
        assert completion.log_probs.tolist() == [-row] * length
        assert completion.versions.tolist() == [2 * row] * length
        assert completion.finish == FINISHES[row % 3]


def test_columns_split_into_the_completions_of_each_request() -> None:
    columns = PackedRollouts(
        lengths=np.array([2, 1, 3], np.int32),
        tokens=np.arange(6, dtype=np.int32),
        log_probs=-np.arange(6, dtype=np.float32),
        versions=np.full(6, 4, np.int32),
        finishes=np.array([0, 1, 2], np.int8),
    )
    first, second = columns.split([TurnRequest("a", [1], 2, 8, 1.0, 0), TurnRequest("b", [1], 1, 8, 1.0, 0)])
    assert [(one.request_id, one.tokens.tolist(), one.finish) for one in first] == [
        ("a", [0, 1], "stop"),
        ("a", [2], "length"),
    ]
    assert [(one.request_id, one.tokens.tolist(), one.finish) for one in second] == [("b", [3, 4, 5], "abort")]
    assert second[0].log_probs.tolist() == [-3, -4, -5]
    assert second[0].versions.tolist() == [4, 4, 4]


class AtWork:
    """An engine that says in turn how many steps it has made."""

    name = "engine-0"

    def __init__(self, steps: list[int]) -> None:
        self._steps = steps

    def start(self, method: Callable[..., Any]) -> Any:
        return Answer([self._steps.pop(0)], late=0)


class Answer:
    """Comes after being waited for `late` times in vain."""

    def __init__(self, result: list[Any], late: int, engine: Any = None) -> None:
        self._result, self._late, self.workers = result, late, [engine]

    def wait(self, deadline_s: float) -> list[Any]:
        if self._late:
            self._late -= 1
            raise WorkerTimeout("generate", ["engine-0"], deadline_s, "run.deadline_s")
        return self._result


def gathered(steps: list[int], late: int) -> tuple[Any, list[int]]:
    """What the pool makes of an engine that is late, and the engines that it counts as lost."""
    pool: Any = GeneratorPool.__new__(GeneratorPool)
    lost: list[int] = []
    pool._deadline_s, pool._count_loss = 600.0, lambda index, reason: lost.append(index)
    return pool._gather(0, Answer(["columns"], late, AtWork(steps))), lost


def test_an_engine_that_makes_steps_may_take_longer_than_the_deadline() -> None:
    assert gathered([10, 20, 30], late=3) == ("columns", [])


def test_an_engine_that_makes_no_step_is_lost() -> None:
    assert gathered([10, 20, 20], late=9) == (None, [0])
