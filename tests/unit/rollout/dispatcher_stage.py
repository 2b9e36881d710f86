"""Set-up for tests of the dispatcher: a pool of engines that step on command, on one thread and in virtual time."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.data.tasks import Task
from rlctl.generation import generator_pool
from rlctl.generation.generator_pool import EngineSlot, GeneratorPool
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest
from rlctl.generation.vllm import active_requests
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.players.single_turn import SingleTurnPlayer
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import Sampling
from tests.unit.rollout.fake_engine import FakeRefit, FakeWorker, answer
from tests.virtual_events import VirtualEvents

Answer = tuple[TurnRequest, Completion]
DEADLINE = 10.0
RUN: Any = SimpleNamespace(deadline_s=DEADLINE, explain_after_s=2.0)
TASKS = [Task(f"v{i}", [5, 9], "", None) for i in range(3)]
SAMPLING = Sampling("validation", 0, 3, 2, 8, 1.0)


class Stage:
    """A dispatcher and a pool of fake engines at version 0. Each answer has `max_new_tokens` tokens."""

    def __init__(self, engines: int, at_a_time: int, together: bool = False) -> None:
        FakeWorker.forget_all()
        self.emitted: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[Answer] = []
        self.restarted: list[RolloutId] = []
        self.happen: Callable[[], None] = self.step_engines
        self.events = VirtualEvents(lambda: self.happen())
        spec: Any = SimpleNamespace(
            kind="vllm", tensor_parallel_size=1, max_num_seqs=at_a_time, sleeps=True, dtype="float32", version=-1
        )
        self.pool = GeneratorPool(spec, [EngineSlot({})] * engines, "", DEADLINE, 3, self.emit)
        refit: Any = FakeRefit(lambda: "", lambda: None)
        self.pool.connect(refit)
        self.pool.sync(0)
        self.dispatcher = RolloutDispatcher(self.pool, RUN, self.emit, self.events, waits_for_all=together)
        self.dispatcher.restarted = self.note_restarted
        self.runner = RolloutRunner(SingleTurnPlayer(), self.dispatcher)
        self.tasks: dict[RequestId, Any] = {}

    def emit(self, kind: str, **fields: Any) -> None:
        self.emitted.append((kind, fields))

    async def note_restarted(self, rollouts: list[RolloutId]) -> None:
        self.restarted += rollouts

    def submit(self, requests: Sequence[TurnRequest], ahead: bool = False, turns_follow: bool = False) -> None:
        """Start a task for each request that awaits its turn, and let the dispatcher send the requests to engines."""

        async def sample(request: TurnRequest) -> None:
            completion = await self.dispatcher.sample_turn(request, ahead=ahead, turns_follow=turns_follow)
            self.answers.append((request, completion))

        for request in requests:
            self.tasks[request.id] = self.events.loop.create_task(sample(request))
        self.go_on()

    def cancel(self, requests: Sequence[TurnRequest]) -> None:
        for request in requests:
            self.tasks[request.id].cancel()
        self.go_on()

    def finish(self, rollouts: Sequence[RolloutId]) -> None:
        self.events.ask(lambda: self.dispatcher.finish(rollouts))
        self.go_on()

    def go_on(self) -> None:
        """Run all callbacks that are ready, without letting time pass."""
        while self.events.step():
            pass

    def step_engines(self, seconds: float = 1.0) -> None:
        """Let every engine make one step, then let `seconds` of virtual time pass."""
        for worker in self.pool.engines:
            if worker.makes_steps:  # type: ignore[attr-defined]
                worker.engine.step()  # type: ignore[attr-defined]
        self.events.let_pass(seconds)

    def list_sampling(self, index: int) -> list[tuple[int, int]]:
        """Return (group, index) of the turns that an engine samples, in its order."""
        worker: Any = self.pool.engines[index]
        rollouts = [request.id.rollout for request in worker.engine.active]
        return [(rollout.group, rollout.index) for rollout in rollouts]

    @property
    def answered_ids(self) -> list[RequestId]:
        return [request.id for request, _ in self.answers]


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put stand-ins in place of engines, whose answers have the length of their `max_new_tokens`."""
    monkeypatch.setattr(generator_pool, "Worker", FakeWorker)
    answer(monkeypatch, lambda request: request.max_new_tokens)
    monkeypatch.setattr(active_requests, "GATHER_S", 0.0)
