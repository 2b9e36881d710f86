"""An engine whose weights may be a mixture samples no more; its workers' answers are read to the last."""

from typing import Any

import pytest

from rlctl.generation.active_requests import ActiveRequests, EngineStats
from rlctl.generation.engine import Engine, RefitState
from rlctl.generation.vllm_worker import answered
from rlctl.refit.protocol import Header, RefitError
from tests.turns import turn, turns


def engine() -> Any:
    """Without vLLM, and without its thread."""
    one: Any = Engine.__new__(Engine)
    one._requests, one._poisoned, one._version, one._stats = ActiveRequests(), "", 4, EngineStats()
    one._state = RefitState.SERVING
    return one


def test_what_runs_ends_with_the_refit_that_failed() -> None:
    one = engine()
    for request in turns(0, 2, [1], 8):
        one._requests.add(request, 4)

    def torn() -> float:
        raise RefitError("lm_head.weight arrived changed")

    with pytest.raises(RefitError, match="arrived changed"):
        one._change(Header(5, "digest", "all"), torn)
    assert not one._requests
    with pytest.raises(RefitError, match="arrived changed"):
        one.collect(0.0)
    assert one._version == 4 and one._state is RefitState.POISONED
    with pytest.raises(RuntimeError, match="must not be used: the refit to version 5 failed"):
        one._add([turn(1)])


class Workers:
    """vLLM, as far as calls to its workers go."""

    def __init__(self, failing: set[int]) -> None:
        self._failing = failing
        self.asked = 0

    @answered
    def rl_staged(self, rank: int) -> int:
        if rank in self._failing:
            raise RefitError(f"rank {rank} lost its peer")
        return rank

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.asked += 1
        return [getattr(self, method)(rank, *args) for rank in range(3)]


def test_a_failure_is_raised_when_every_worker_has_answered() -> None:
    one = engine()
    one._llm = Workers({1, 2})
    with pytest.raises(RefitError, match="rank 1 lost its peer"):
        one._workers("rl_staged")
    one._llm = Workers(set())
    assert one._workers("rl_staged") == [0, 1, 2]
