"""A pool brings engines to a version through any loss on the way, and refuses to sample while they sleep."""

from collections.abc import Callable
from typing import Any

import pytest

from rlctl.generation import generator_pool as pool_module
from rlctl.generation.generator_pool import EngineSlot, GeneratorPool
from rlctl.refit.protocol import RefitInterrupted, RefitReport, Untouched
from rlctl.refit.refit import EnginesLost
from rlctl.workers.errors import EngineUnusable, Failure, WorkerDied, WorkerError

DIED = WorkerDied("refit_receive", ["engine"], "its process is gone")
UNTOUCHED = WorkerError("refit_receive", [Failure("engine", Untouched.__name__, "arrived changed", "")])


class FakeWorker:
    """Worker that is ready at once, instead of an engine's process."""

    lost_its_node = False

    def __init__(self, spec: Any) -> None:
        self.name = spec.name
        self.alive = True

    def built(self) -> "FakeWorker":
        return self

    def wait(self, deadline_s: float, knob: str = "") -> list[None]:
        return [None]

    def start(self, method: Callable[..., Any], *args: Any) -> "FakeWorker":
        CALLS.append((self.name, method.__name__, *args))
        return self

    def kill(self) -> None:
        self.alive = False


CALLS: list[tuple[Any, ...]] = []


class FakeRefit:
    """Refit whose attempts fail as planned. failures: for each attempt, index of a lost engine -> its error."""

    def __init__(self, *failures: dict[int, Exception]) -> None:
        self.failures = list(failures)
        self.resent = list[tuple[list[str], list[str]]]()

    def _attempt(self) -> None:
        if self.failures and (failure := self.failures.pop(0)):
            raise EnginesLost(failure)

    def rest_trainers(self) -> None:
        CALLS.append(("trainers", "rest"))

    def run(self, engines: list[Any], version: int, checks: Any) -> RefitReport:
        CALLS.append(("refit", version))
        self._attempt()
        return RefitReport(seconds=0.1, bytes=8)

    def catch_up(self, behind: list[Any], version: int) -> None:
        self.resent.append(([], [end.worker.name for end in behind]))
        self._attempt()

    def resend(self, engines: list[Any], fresh: list[Any], behind: list[Any], version: int) -> None:
        self.resent.append(([end.worker.name for end in fresh], [end.worker.name for end in behind]))
        self._attempt()


class Spec:
    """The fields of EngineSpec that the pool reads."""

    kind = "vllm"
    tensor_parallel_size = 1
    max_num_seqs = 4
    sleeps = True
    version = -1


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, FakeRefit, list[tuple[str, Any]]]]:
    CALLS.clear()
    monkeypatch.setattr(pool_module, "Worker", FakeWorker)

    def build(*failures: dict[int, Exception], engines: int = 3, restarts: int = 9) -> Any:
        events: list[tuple[str, Any]] = []
        emit = lambda kind, **fields: events.append((kind, fields.get("engine")))  # noqa: E731
        spec: Any = Spec()
        pool = GeneratorPool(spec, [EngineSlot({})] * engines, "logs", 5.0, restarts, emit)
        refit: Any = FakeRefit(*failures)
        pool._refit = refit
        return pool, refit, events

    return build


def test_all_engines_come_to_the_version(make: Any) -> None:
    pool, _, events = make()
    assert pool.sync(4) == RefitReport(seconds=0.1, bytes=8)
    assert pool.version == 4 and not events


def test_a_dead_engine_is_rebuilt_and_an_untouched_one_gets_the_version_again(make: Any) -> None:
    pool, refit, events = make({1: DIED, 2: UNTOUCHED})
    dead_engine = pool.slots[1]
    untouched_engine = pool.slots[2]
    report = pool.sync(4)
    # At once, while the other one starts.
    assert refit.resent == [([], ["engine-2"]), (["engine-1"], [])]
    assert not dead_engine.alive and pool.slots[1] is not dead_engine
    assert pool.slots[2] is untouched_engine
    assert report.rebuilt == (1,) and not report.bytes
    assert events == [("engine_lost", 1), ("engine_restarted", 1)]


def test_engines_that_fall_out_during_the_recovery_are_rebuilt_too(make: Any) -> None:
    pool, refit, events = make({0: DIED}, {2: DIED, 1: UNTOUCHED}, {}, restarts=2)
    assert pool.sync(5).rebuilt == (0, 2)
    assert refit.resent == [(["engine-0"], []), ([], ["engine-1"]), (["engine-2"], [])]
    assert [kind for kind, _ in events] == ["engine_lost", "engine_lost", "engine_restarted", "engine_restarted"]
    assert pool.version == 5


def test_hundreds_of_losses_need_no_deeper_stack(make: Any) -> None:
    pool, refit, _ = make(*[{0: DIED}] * 2000, restarts=2000)
    assert pool.sync(1).rebuilt == (0,)
    assert len(refit.resent) == 2000


@pytest.mark.parametrize("failure", [Untouched, RefitInterrupted])
def test_a_dead_engine_costs_its_own_restart_alone_whatever_the_others_were_doing(make: Any, failure: type) -> None:
    intact = WorkerError("refit_receive", [Failure("engine", failure.__name__, "a peer is lost", "")])
    pool, refit, events = make({3: DIED} | {index: intact for index in range(8) if index != 3}, engines=8, restarts=1)
    assert pool.sync(4).rebuilt == (3,)
    intact_engines = [f"engine-{index}" for index in range(8) if index != 3]
    assert refit.resent == [([], intact_engines), (["engine-3"], [])]
    assert events == [("engine_lost", 3), ("engine_restarted", 3)]


def test_an_engine_that_dies_while_another_starts_leaves_the_started_one_alone(make: Any) -> None:
    pool, refit, events = make({0: DIED, 1: UNTOUCHED, 2: UNTOUCHED}, {1: DIED, 0: UNTOUCHED})
    pool.sync(4)
    assert refit.resent == [([], ["engine-1", "engine-2"]), ([], ["engine-1"]), (["engine-0", "engine-2"], [])]
    assert [index for kind, index in events if kind == "engine_lost"] == [0, 2]


def test_an_engine_that_alone_stays_untouched_is_at_fault_itself(make: Any) -> None:
    pool, refit, events = make({2: UNTOUCHED}, {2: UNTOUCHED})
    pool.sync(4)
    assert refit.resent == [([], ["engine-2"]), (["engine-2"], [])]
    assert events == [("engine_lost", 2), ("engine_restarted", 2)]


def test_restarts_are_bounded(make: Any) -> None:
    pool, _, _ = make({0: DIED}, {0: DIED}, restarts=1)
    with pytest.raises(RuntimeError, match=r"generation\.max_restarts=1 are used up"):
        pool.sync(4)


def make_error(text: str, call: str = "collect") -> WorkerError:
    return WorkerError(call, [Failure("engine", "RuntimeError", text, "")])


def test_an_error_that_two_engines_raise_before_any_token_ends_the_run(make: Any) -> None:
    pool, _, events = make(engines=1)
    pool.replace({0: make_error("no kernel for head_dim=24 at 0x7f00")}, early=[0])
    with pytest.raises(EngineUnusable, match="engine-0 cannot sample, as the one before it: RuntimeError: no kernel"):
        pool.replace({0: make_error("no kernel for head_dim=24 at 0x8a10")}, early=[0])
    assert events == [("engine_lost", 0), ("engine_restarted", 0), ("engine_lost", 0)]
    # Two engines that begin together need no restart to know it.
    pool, _, events = make(engines=2)
    with pytest.raises(EngineUnusable):
        pool.replace({0: make_error("no kernel"), 1: make_error("no kernel")}, early=[0, 1])
    assert "engine_restarted" not in dict(events)


def test_an_engine_that_has_sampled_or_died_or_raises_another_error_is_replaced(make: Any) -> None:
    pool, _, events = make(engines=1)
    for error, early in (
        (make_error("a"), [0]),
        (make_error("a"), []),
        (make_error("b"), [0]),
        (DIED, [0]),
        (DIED, [0]),
    ):
        pool.replace({0: error}, early)
    assert [kind for kind, _ in events] == ["engine_lost", "engine_restarted"] * 5


def test_sleeping_engines_wake_around_the_refit_and_sample_nothing_before(make: Any) -> None:
    pool, _, _ = make(engines=1)
    pool.rest()
    with pytest.raises(RuntimeError, match="the generator sleeps: sync it"):
        pool.require_awake()
    CALLS.clear()
    report = pool.sync(7)
    assert report.rest > 0 and report.wake > 0
    wake_calls = [("engine-0", "wake", part) for part in ("weights", "kv_cache")]
    assert [("trainers", "rest"), wake_calls[0], ("refit", 7), wake_calls[1]] == CALLS
    pool.require_awake()
