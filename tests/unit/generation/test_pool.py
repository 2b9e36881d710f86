"""Sharing requests out over engines, and reading completions back from columns."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlctl.generation.pool import share_out
from rlctl.generation.requests import Columns, SampleRequest

requests = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 8), st.integers(1, 64)), max_size=40).map(
    lambda rows: [SampleRequest(f"r{i}", [1] * p, n, t, 1.0, i) for i, (p, n, t) in enumerate(rows)]
)


@given(requests, st.integers(1, 5))
def test_every_request_goes_to_one_engine_and_loads_are_even(batch: list[SampleRequest], engines: int) -> None:
    shares = share_out(batch, engines)
    assert len(shares) == engines
    assert sorted(request.id for share in shares for request in share) == sorted(request.id for request in batch)
    loads = [sum(request.cost for request in share) for share in shares]
    assert max(loads) - min(loads) <= max((request.cost for request in batch), default=0)
    assert shares == share_out(batch, engines)


def test_an_engine_keeps_the_order_of_its_requests() -> None:
    batch = [SampleRequest(f"r{i}", [1], 1, cost, 1.0, 0) for i, cost in enumerate((5, 9, 5, 9))]
    for share in share_out(batch, 2):
        assert [request.id for request in share] == sorted(request.id for request in share)


def test_columns_split_into_the_completions_of_each_request() -> None:
    columns = Columns(
        lengths=np.array([2, 1, 3], np.int32),
        tokens=np.arange(6, dtype=np.int32),
        log_probs=-np.arange(6, dtype=np.float32),
        versions=np.full(6, 4, np.int32),
        finishes=np.array([0, 1, 2], np.int8),
    )
    first, second = columns.split([SampleRequest("a", [1], 2, 8, 1.0, 0), SampleRequest("b", [1], 1, 8, 1.0, 0)])
    assert [(one.request_id, one.tokens.tolist(), one.finish) for one in first] == [
        ("a", [0, 1], "stop"),
        ("a", [2], "length"),
    ]
    assert [(one.request_id, one.tokens.tolist(), one.finish) for one in second] == [("b", [3, 4, 5], "abort")]
    assert second[0].log_probs.tolist() == [-3, -4, -5]
    assert second[0].versions.tolist() == [4, 4, 4]
