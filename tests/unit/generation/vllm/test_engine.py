"""An engine whose weights may be a mixture, or were dropped, samples no more; its workers' answers are read to the
last."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.generation.engine import EngineStats, LoadMode
from rlctl.generation.vllm.active_requests import ActiveRequests
from rlctl.generation.vllm.engine import RefitState, VllmEngine
from rlctl.generation.vllm.worker import answered
from rlctl.refit.protocol import Header, RefitError, Untouched
from tests.turns import turn, turns
from tests.unit.rollout.fake_engine import SteppedEngine, answer


def engine() -> Any:
    """Without vLLM, and without its thread."""
    one: Any = VllmEngine.__new__(VllmEngine)
    one._requests, one._poisoned, one._version, one._stats = ActiveRequests(), "", 4, EngineStats()
    one._spec, one._llm, one._entering = SimpleNamespace(recompute_kv_cache=False), None, deque()
    one._state, one._overwrites, one._dropped = RefitState.SERVING, False, False
    one._on_thread, one._enter = lambda work: work(), lambda request: None
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
        one._add([turn(1)], [None])


def stepped(monkeypatch: pytest.MonkeyPatch) -> SteppedEngine:
    """An engine at version 4, whose model has room for four sequences, and for 16 that wait."""
    answer(monkeypatch, lambda request: 3)
    one = SteppedEngine()
    one.serve(4, Header(4, "digest", "all"), torn=False)
    return one


def test_requests_enter_a_few_a_step_and_each_is_answered_by_the_weights_that_it_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = stepped(monkeypatch)
    one.submit([turn(number) for number in range(30)])
    one.step()
    assert len(one._llm.running) == 20 and len(one._entering) == 10
    # The last two are given up, and the last one is asked for again.
    assert one.abort([turn(28).id, turn(29).id]) == 0
    one.submit([turn(29)])
    one.serve(5, Header(5, "digest", "all"), torn=False)
    found = dict[str, list[int]]()
    while one._requests:
        one.step()
        turns = one.collect(0.0)
        found |= {str(name): done.versions.tolist() for name, done in zip(turns.ids, turns.columns.unpack())}
    versions = [[4, 5, 5]] * 20 + [[5, 5, 5]] * 8
    assert found == {str(turn(number).id): versions[number] for number in range(28)} | {str(turn(29).id): [5, 5, 5]}


def test_what_has_not_entered_ends_with_an_engine_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(llm: Any, request: Any) -> None:
        raise MemoryError("no room for a request")

    one = stepped(monkeypatch)
    monkeypatch.setattr("rlctl.generation.vllm.engine.add_request", fail)
    one.submit([turn(0), turn(1)])
    one.step()
    assert not one._requests and not one._entering
    with pytest.raises(MemoryError, match="no room for a request"):
        one.collect(0.0)
    with pytest.raises(RuntimeError, match="must not be used: vLLM failed in a step"):
        one.submit([turn(2)])


class Sleeper:
    """vLLM that falls asleep, and whose two workers join a transport; nothing that is staged arrives whole."""

    def __init__(self, *overwrites: bool) -> None:
        self.levels, self._overwrites = list[int](), overwrites

    def sleep(self, level: int) -> None:
        self.levels.append(level)

    def wake_up(self, tags: list[str]) -> None:
        pass

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "rl_open":
            return [LoadMode("staged", "", 0, each) for each in self._overwrites]
        return [RefitError("arrived changed") if method == "rl_staged" else 0 for _ in self._overwrites]


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl.generation.vllm.engine.vllm_request", lambda llm, spec, request: None)


HEADER = Header(5, "digest", "all")


def slept(*overwrites: bool) -> Any:
    """An engine that slept, and is awake again."""
    one, opening = engine(), (None, None, 1, "auto", False)
    one._llm = Sleeper(*overwrites)
    one.refit_open(*opening)
    one.sleep()
    one.wake("weights")
    one.wake("kv_cache")
    return one


def test_an_engine_whose_weights_were_dropped_samples_nothing_before_a_refit_made_others_live() -> None:
    one = slept(True, True)
    one._restart_what_has_not_begun = list
    assert one._llm.levels == [2]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="weights were dropped when it fell asleep: a refit must come first"):
            one.submit([turn(1)])
        # What arrives beside the live weights, changed, makes them no better.
        with pytest.raises(Untouched, match="arrived changed"):
            one.refit_receive(HEADER)
    one._change(HEADER, lambda: 0.0)
    one.submit([turn(1)])
    assert one._requests


def test_weights_are_kept_where_a_refit_leaves_one_worker_anything_of_them() -> None:
    one = slept(True, False)
    assert one._llm.levels == [1]
    one.submit([turn(1)])


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
