"""An engine stops sampling if its weights may be a mixture or were dropped. It reads the answers of all its workers."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from rlctl.generation.engine import LoadMode
from rlctl.refit.protocol import Header, LiveProof, PeerLost, ReceiveReport, RefitError, RefitInterrupted, Untouched
from tests.turns import turn, turns
from tests.unit.rollout.fake_engine import FakeModel, SteppedEngine, answer

HEADER = Header(5, "digest", "all")
REPORT = ReceiveReport(0.0, 0.0, 1.0, 1, 0)
PROVEN = Header(5, "digest", "all", prove=True)
Method = TypeVar("Method", bound=Callable[..., Any])


def return_errors(method: Method) -> Method:
    """Return `method`, wrapped as in a worker. The import is inside, because importing vLLM takes 5 s."""
    from rlctl.generation.vllm import worker_extension as worker

    return worker.return_errors(method)


class Model(FakeModel):
    """Stand-in for vLLM with two workers, which receive refits, sleep, and answer calls by method name.

    overwrites: `LoadMode.overwrites` of each worker. failing: error message of both workers' refits; empty if refits
    succeed.
    """

    def __init__(self, mode: str = "direct", overwrites: tuple[bool, ...] = (True, True), failing: str = "") -> None:
        super().__init__()
        self.levels = list[int]()
        self.failing = [failing] * 2
        self.error: type[RefitError] = RefitError
        # Name of a tensor whose live values differ from the sent ones; empty for none.
        self.differs = ""
        self.steps = 0
        self.proven_after = list[int]()
        self._mode: Any = mode
        self._overwrites = overwrites

    def sleep(self, level: int) -> None:
        self.levels.append(level)

    def wake_up(self, tags: list[str]) -> None:
        pass

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(self, method)(rank) for rank in range(2)]

    def rl_room(self, rank: int) -> int:
        return 0

    rl_stage = rl_room

    def rl_commit(self, rank: int) -> None:
        self.committing = 2

    def rl_committed(self, rank: int) -> float | None:
        """Return a result only from the second call on for rank 1, and at once for rank 0."""
        self.committing -= rank
        return None if rank and self.committing else 0.25

    def rl_open(self, rank: int) -> LoadMode:
        return LoadMode(self._mode, "", 0, self._overwrites[rank])

    def rl_receive(self, rank: int) -> ReceiveReport:
        return return_errors(self._receive)(rank)

    def _receive(self, rank: int) -> ReceiveReport:
        if self.failing[rank]:
            raise self.error(self.failing[rank])
        return REPORT

    rl_staged = rl_receive

    def rl_prove(self, rank: int) -> LiveProof:
        return return_errors(self._prove)(rank)

    def _prove(self, rank: int) -> LiveProof:
        """Return the proof of the live weights, wrong if `differs` is set. Record the number of steps made before."""
        self.proven_after.append(self.steps)
        if self.differs:
            raise RefitError(f"{self.differs} is live with other numbers than version 5 was sent with")
        return LiveProof(5, 7, 1, 1)

    def step(self) -> list[Any]:
        self.steps += 1
        return super().step()


def make_engine(monkeypatch: pytest.MonkeyPatch, model: FakeModel | None = None) -> SteppedEngine:
    """Return an engine at version 4, whose model has room for four running and 16 waiting sequences.

    An answer has three tokens.
    """
    answer(monkeypatch, lambda request: 3)
    engine = SteppedEngine(model)
    engine.serve(4, Header(4, "digest", "all"), torn=False)
    if isinstance(model, Model):
        transport: Any = None
        engine.refit_open(transport, transport, 1, "auto", False)
    return engine


def test_what_runs_ends_with_the_refit_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, Model(failing="lm_head.weight arrived changed"))
    engine.submit(turns(0, 2, [1], 8))
    with pytest.raises(RefitError, match="arrived changed"):
        engine.refit_receive(HEADER)
    with pytest.raises(RefitError, match="arrived changed"):
        engine.collect(0.0)
    with pytest.raises(RuntimeError, match="must not be used: the refit to version 5 failed"):
        engine.submit([turn(1)])


def test_what_runs_waits_for_the_version_where_a_refit_lost_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(failing="engine-1 died")
    model.error = PeerLost
    engine = make_engine(monkeypatch, model)
    engine.submit([turn(0)])
    engine.step()
    with pytest.raises(RefitInterrupted, match="engine-1 died"):
        engine.refit_receive(HEADER)
    assert not engine._has_work
    # It takes requests meanwhile, and goes on once the version is there.
    engine.submit([turn(1)])
    model.failing = ["", ""]
    engine.refit_receive(HEADER)
    assert engine._has_work
    while engine.active:
        engine.step()
    turns = engine.collect(0.0)
    versions = {str(name): done.versions.tolist() for name, done in zip(turns.ids, turns.columns.unpack())}
    assert versions == {str(turn(0).id): [4, 5, 5], str(turn(1).id): [5, 5, 5]}


def test_requests_enter_a_few_a_step_and_each_is_answered_by_the_weights_that_it_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(monkeypatch)
    engine.submit([turn(number) for number in range(30)])
    engine.step()
    assert len(engine.model.running) == 20
    # The last two are given up, and the last one is asked for again.
    assert engine.abort([turn(28).id, turn(29).id]) == 0
    engine.submit([turn(29)])
    engine.serve(5, HEADER, torn=False)
    versions_by_name = dict[str, list[int]]()
    while engine.active:
        engine.step()
        turns = engine.collect(0.0)
        versions_by_name |= {str(name): done.versions.tolist() for name, done in zip(turns.ids, turns.columns.unpack())}
    versions = [[4, 5, 5]] * 20 + [[5, 5, 5]] * 8
    expected_versions = {str(turn(number).id): versions[number] for number in range(28)}
    assert versions_by_name == expected_versions | {str(turn(29).id): [5, 5, 5]}


def test_what_has_not_entered_ends_with_an_engine_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(llm: Any, request: Any) -> None:
        raise MemoryError("no room for a request")

    engine = make_engine(monkeypatch)
    monkeypatch.setattr("rlctl.generation.vllm.engine.add_request", fail)
    engine.submit([turn(0), turn(1)])
    engine.step()
    assert not engine.active
    with pytest.raises(MemoryError, match="no room for a request"):
        engine.collect(0.0)
    with pytest.raises(RuntimeError, match="must not be used: vLLM failed in a step"):
        engine.submit([turn(2)])


def wake_engine(monkeypatch: pytest.MonkeyPatch, model: Model) -> SteppedEngine:
    """Return an engine that has slept and was woken."""
    engine = make_engine(monkeypatch, model)
    engine.sleep()
    engine.wake("weights")
    engine.wake("kv_cache")
    return engine


def test_an_engine_whose_weights_were_dropped_samples_nothing_before_a_refit_made_others_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model("staged", failing="arrived changed")
    engine = wake_engine(monkeypatch, model)
    assert model.levels == [2]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="weights were dropped when it fell asleep: a refit must come first"):
            engine.submit([turn(1)])
        # Other weights arrive, changed; the live ones stay as bad.
        with pytest.raises(Untouched, match="arrived changed"):
            engine.refit_receive(HEADER)
    engine.serve(5, HEADER, torn=False)
    engine.submit([turn(1)])
    assert engine.active


def test_weights_are_kept_where_a_refit_leaves_one_worker_anything_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(overwrites=(True, False))
    engine = wake_engine(monkeypatch, model)
    assert model.levels == [1]
    engine.submit([turn(1)])


def test_a_failure_is_raised_when_every_worker_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("staged")
    engine = make_engine(monkeypatch, model)
    model.failing = ["rank 0 lost its peer", "rank 1 lost its peer"]
    with pytest.raises(Untouched, match="rank 0 lost its peer"):
        engine.refit_receive(HEADER)
    model.failing = ["", "rank 1 lost its peer"]
    with pytest.raises(Untouched, match="rank 1 lost its peer"):
        engine.refit_receive(HEADER)
    model.failing = ["", ""]
    report = engine.refit_receive(HEADER)
    assert report.received.bytes == 1 and engine.version == 5


def test_a_commit_lasts_until_the_device_of_every_worker_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("staged")
    engine = make_engine(monkeypatch, model)
    assert engine.refit_receive(HEADER).commit == 0.25 and model.committing == 0
    assert engine.collect(0.0).stats.paused == 0.25


def test_a_version_is_proven_after_the_step_that_follows_before_its_tokens_are_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device is busy after a commit, so an engine that proved the version at once would stall for a step."""
    model = Model("staged")
    engine = make_engine(monkeypatch, model)
    engine.submit([turn(0)])
    engine.step()
    # As `refit_receive` does on the engine's thread.
    engine._change(PROVEN, lambda: engine._make_live(PROVEN, [REPORT]))
    assert not model.proven_after
    engine.step()
    assert model.proven_after == [2, 2]
    engine.step()
    assert engine.collect(0.0).columns.unpack()[0].versions.tolist() == [4, 5, 5]
    # An engine that samples nothing proves at once.
    report = engine.refit_receive(PROVEN)
    assert report.proofs == (LiveProof(5, 7, 1, 1),) * 2
    assert model.proven_after == [2, 2, 3, 3]


def test_no_answer_leaves_an_engine_whose_live_adapters_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("staged")
    engine = make_engine(monkeypatch, model)
    engine.submit([turn(0), turn(1)])
    engine.step()
    engine.step()
    model.differs = "q_proj.lora_B.weight"
    engine._change(PROVEN, lambda: engine._make_live(PROVEN, [REPORT]))
    # The step that ends both.
    engine.step()
    with pytest.raises(RefitError, match=r"lora_B\.weight is live with other numbers"):
        engine._proofs()
    with pytest.raises(RefitError, match=r"lora_B\.weight is live with other numbers"):
        engine.collect(0.0)
    with pytest.raises(RuntimeError, match="must not be used: the refit to version 5 failed"):
        engine.submit([turn(2)])
