"""The dispatcher on engines that step on command: the engine of each request, the receiver of each answer, the
queue."""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlctl.data.cursor import Cursor, TaskSource
from rlctl.data.tasks import Task
from rlctl.generation import generator_pool
from rlctl.generation.generator_pool import EngineSlot, GeneratorPool
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest
from rlctl.generation.vllm import active_requests
from rlctl.preflight.load import load
from rlctl.rollout.buffer import RolloutBuffer
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.players.single_turn import SingleTurnPlayer
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.turn_placement import LeastLoaded
from rlctl.rollout.types import Sampling
from tests.turns import turn, turns
from tests.unit.rollout.fake_engine import FakeRefit, FakeWorker, answer
from tests.virtual_events import VirtualEvents

Answer = tuple[TurnRequest, Completion]
DEADLINE = 10.0
RUN: Any = SimpleNamespace(deadline_s=DEADLINE, explain_after_s=2.0)
TASKS = [Task(f"v{i}", [5, 9], "", None) for i in range(3)]
SAMPLING = Sampling("validation", 0, 3, 2, 8, 1.0)


class Stage:
    """A pool of fake engines at version 0, and a dispatcher; answers have the length of their `max_new_tokens`."""

    def __init__(self, engines: int, at_a_time: int, together: bool = False) -> None:
        FakeWorker.forget_all()
        self.emitted: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[Answer] = []
        self.restarted: list[RolloutId] = []
        self.happen: Callable[[], None] = self.all_go_on
        self.events = VirtualEvents(lambda: self.happen())
        spec: Any = SimpleNamespace(
            kind="vllm", tensor_parallel_size=1, max_num_seqs=at_a_time, sleeps=True, dtype="float32", version=-1
        )
        self.pool = GeneratorPool(spec, [EngineSlot({})] * engines, "", DEADLINE, 3, self.emit)
        refit: Any = FakeRefit(lambda: "", lambda: None)
        self.pool.connect(refit)
        self.pool.sync(0)
        self.dispatcher = RolloutDispatcher(self.pool, RUN, self.emit, self.events, together=together)
        self.dispatcher.restarted = self.note_restarted
        self.runner = RolloutRunner(SingleTurnPlayer(), self.dispatcher)
        self.tasks: dict[RequestId, Any] = {}

    def emit(self, kind: str, **fields: Any) -> None:
        self.emitted.append((kind, fields))

    async def note_restarted(self, rollouts: list[RolloutId]) -> None:
        self.restarted += rollouts

    def submit(self, requests: Sequence[TurnRequest], ahead: bool = False, turns_follow: bool = False) -> None:
        """Await the turns of these requests, each in a task, and hand them out."""

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
        """Do all that is to do at this moment."""
        while self.events.step():
            pass

    def all_go_on(self, seconds: float = 1.0) -> None:
        """Let engines make a step, and some time pass."""
        for worker in self.pool.engines:
            if worker.steps:  # type: ignore[attr-defined]
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


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_pool, "Worker", FakeWorker)
    answer(monkeypatch, lambda request: request.max_new_tokens)
    monkeypatch.setattr(active_requests, "GATHER_S", 0.0)


def turns_of_groups(groups: Iterable[int], size: int, longest: int) -> list[TurnRequest]:
    """Return the requests of the groups with these numbers."""
    return list(chain.from_iterable(turns(group, size, [1], longest) for group in groups))


groups = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 64)), min_size=1, max_size=30)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(groups, st.integers(1, 4))
def test_groups_stay_whole_in_order_and_loads_are_even(shape: list[tuple[int, int]], engines: int) -> None:
    stage = Stage(engines, at_a_time=1000)
    requests: list[TurnRequest] = []
    for group, (size, longest) in enumerate(shape):
        requests += turns(group, size, [1], longest)
    stage.submit(requests)
    shares = [stage.list_sampling(index) for index in range(engines)]
    expected = [(request.id.rollout.group, request.id.rollout.index) for request in requests]
    assert sorted(chain.from_iterable(shares)) == sorted(expected)
    assert all(share == sorted(share) for share in shares)
    assert sum(len({group for group, _ in share}) for share in shares) == len(shape)
    loads = [sum(shape[group][1] for group, _ in share) for share in shares]
    # List scheduling (Graham 1966): at most the mean and the costliest group.
    costliest = max(size * longest for size, longest in shape)
    assert max(loads) - min(loads) <= costliest


def test_an_engine_gets_what_it_decodes_at_a_time_and_room_as_each_rollout_ends() -> None:
    stage = Stage(1, at_a_time=3)
    short = [turn(0, 0, longest=1), turn(0, 1, longest=5)]
    stage.submit([*short, *turns(1, 2, [1], 5), *turns(2, 2, [1], 5)])
    # Two are fewer than three, so a second group begins; four are not.
    assert stage.list_sampling(0) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    stage.all_go_on()
    assert stage.answered_ids == [turn(0, 0).id]
    assert (2, 0) not in stage.list_sampling(0)
    for _ in range(4):
        stage.all_go_on()
    assert len(stage.answers) == 4 and stage.list_sampling(0) == [(2, 0), (2, 1)]


def test_turns_of_a_rollout_that_are_submitted_together_go_to_the_engine_that_has_its_prefix() -> None:
    stage = Stage(2, at_a_time=4)
    waves = []
    for first in (turn(0, 0), turn(1, 0)):
        waves.append([replace(first, id=RequestId(first.id.rollout, number)) for number in range(6)])
    for wave in waves:
        stage.submit(wave[:3], turns_follow=True)
    assert [set(stage.list_sampling(index)) for index in range(2)] == [{(0, 0)}, {(1, 0)}]
    for wave in waves[::-1]:
        stage.submit(wave[3:], turns_follow=True)
    assert [stage.list_sampling(index) for index in range(2)] == [[(0, 0)] * 6, [(1, 0)] * 6]


def test_validation_goes_ahead_of_what_waits_and_each_gets_its_own_answers() -> None:
    stage = Stage(1, at_a_time=2)
    stage.submit(turns_of_groups(range(6), 2, 4))
    validated = stage.dispatcher.sample(stage.runner, SAMPLING, TASKS, 0)
    assert [group.task for group in validated] == TASKS
    assert [[rollout.id.index for rollout in group.rollouts] for group in validated] == [[0, 1]] * 3
    for group in validated:
        assert all(rollout.id.purpose == "validation" and rollout.num_sampled == 8 for rollout in group.rollouts)
    # Running requests went on; waiting ones still wait.
    assert {request.id.rollout.group for request, _ in stage.answers} == {0}
    assert (
        "8 rollouts not begun" in stage.dispatcher.describe() or "10 rollouts not begun" in stage.dispatcher.describe()
    )


def test_a_validation_outlives_its_engine() -> None:
    stage = Stage(2, at_a_time=4)
    is_lost = False

    def kill_one() -> None:
        nonlocal is_lost
        if not is_lost and stage.list_sampling(0):
            is_lost = True
            stage.pool.engines[0].kill()
        stage.all_go_on()

    stage.happen = kill_one
    validated = stage.dispatcher.sample(stage.runner, SAMPLING, TASKS, 0)
    assert is_lost and [len(group.rollouts) for group in validated] == [2, 2, 2]
    assert [kind for kind, _ in stage.emitted if kind != "warning"] == ["engine_lost", "engine_restarted"]


@pytest.mark.parametrize("waits_for", ["validation", "step"])
def test_a_lost_engine_is_replaced_at_the_moment_of_its_loss(waits_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(2, at_a_time=4)
    replaced_at: list[float] = []
    config = load("grpo", None, ["grpo.num_prompts_per_step=3", "grpo.num_generations_per_prompt=2"]).settled.config
    source = TaskSource(TASKS, Cursor(len(TASKS), 0, False))
    buffer = RolloutBuffer(config, source, stage.dispatcher, stage.runner, list, lambda kind, **fields: None)

    def kill_one() -> None:
        if not replaced_at and stage.list_sampling(0):
            stage.pool.engines[0].kill()
        for worker in stage.pool.engines:
            if stage.events.time > 0.25:
                worker.engine.step()  # type: ignore[attr-defined]
        stage.events.go_on()

    def start_worker(spec: Any) -> FakeWorker:
        replaced_at.append(stage.events.time)
        return FakeWorker(spec)

    monkeypatch.setattr(generator_pool, "Worker", start_worker)
    stage.happen = kill_one
    # The wait looks around at 0.6. The engine's call fails at 0.25.
    stage.events.let_pass(0.1)
    if waits_for == "step":
        buffer.admit(0)
        groups = buffer.take(0, lambda name: nullcontext())
    else:
        groups = stage.dispatcher.sample(stage.runner, SAMPLING, TASKS, 0)
    assert replaced_at == [0.25] and [len(group.rollouts) for group in groups] == [2, 2, 2]


def test_a_validation_that_gets_nothing_is_explained_and_ends_at_its_deadline() -> None:
    stage = Stage(1, at_a_time=4)

    def nothing_comes() -> None:
        # Engines that are rebuilt, and do nothing either.
        for worker in stage.pool.engines:
            worker.hangs = True  # type: ignore[attr-defined]
        stage.events.let_pass(1.0)

    stage.happen = nothing_comes
    with pytest.raises(RuntimeError, match=r"waited 10 s for engine-0 .* generation\.max_restarts=3 are used up"):
        stage.dispatcher.sample(stage.runner, SAMPLING, TASKS, 0)
    warnings = [fields["what"] for kind, fields in stage.emitted if kind == "warning"]
    wait = "s without a new group: validation waits for 6 rollouts; engine-0 samples 4"
    assert any(wait in warning for warning in warnings)


def test_sampling_on_a_sleeping_pool_is_an_error() -> None:
    stage = Stage(1, at_a_time=4)
    stage.pool.asleep = True
    stage.submit([turn(0)])
    refusal = "the generator sleeps: sync it with the trainer before it samples"
    assert str(stage.tasks[turn(0).id].exception()) == refusal
    with pytest.raises(RuntimeError, match="the generator sleeps"):
        stage.dispatcher.sample(stage.runner, SAMPLING, TASKS, 0)


def test_a_turn_that_is_cancelled_is_answered_no_more_wherever_it_was() -> None:
    stage = Stage(1, at_a_time=2)
    requests = turns_of_groups(range(3), 2, 3)
    stage.submit(requests)
    stage.cancel(requests[:4])
    for _ in range(6):
        stage.all_go_on()
    assert set(stage.answered_ids) == {request.id for request in requests[4:]}
    assert all(task.done() for task in stage.tasks.values())


def test_a_cancelled_turn_ends_when_its_engine_confirms_and_begins_again_unharmed() -> None:
    stage = Stage(1, at_a_time=2)
    request = turn(0, longest=3)
    stage.submit([request])
    worker: Any = stage.pool.engines[0]
    # It ends on the engine before the order to stop it arrives.
    for _ in range(3):
        worker.engine.step()
    worker.stuck = True
    stage.cancel([request])
    stage.events.let_pass(6.0)
    assert not stage.tasks[request.id].done() and not stage.dispatcher.drain() and not stage.answers
    worker.stuck = False
    stage.events.let_pass(1.0)
    assert stage.tasks[request.id].cancelled() and stage.dispatcher.drain()
    stage.dispatcher.resume()
    stage.submit([request])
    for _ in range(4):
        stage.all_go_on()
    assert stage.answered_ids == [request.id]


def test_a_cancelled_turn_ends_when_its_engine_is_lost() -> None:
    stage = Stage(2, at_a_time=2)
    requests = [turn(0), turn(1)]
    stage.submit(requests)
    worker: Any = stage.pool.engines[0]
    worker.stuck = True
    stage.cancel(requests[:1])
    stage.events.let_pass(DEADLINE - 1)
    assert not stage.tasks[requests[0].id].done()
    stage.events.let_pass(2.0)
    assert stage.tasks[requests[0].id].cancelled()
    # The other engine did nothing for as long.
    assert stage.dispatcher.repair() and stage.restarted == [requests[1].id.rollout]


def test_it_is_known_how_many_tokens_were_sampled_of_cancelled_turns() -> None:
    stage = Stage(1, at_a_time=4)
    requests = [turn(0, longest=9), turn(1, longest=9), turn(2, longest=2)]
    stage.submit(requests)
    worker: Any = stage.pool.engines[0]
    for _ in range(3):
        worker.engine.step()
    # One has ended, and its answer was not collected yet.
    stage.cancel(requests[1:])
    assert stage.dispatcher.aborted_tokens == 3 + 2
    stage.all_go_on()
    stage.cancel(requests[:1])
    assert stage.dispatcher.aborted_tokens == 3 + 2 + 4


def test_drained_nothing_begins_and_resumed_it_does() -> None:
    stage = Stage(1, at_a_time=1)
    stage.submit([turn(0, longest=2), turn(1, longest=2)])
    assert not stage.dispatcher.drain()
    for _ in range(4):
        stage.all_go_on()
    assert stage.dispatcher.drain() and len(stage.answers) == 1
    stage.dispatcher.resume()
    for _ in range(4):
        stage.all_go_on()
    assert len(stage.answers) == 2


def test_a_defect_on_the_loop_ends_the_wait_at_once_and_not_at_the_deadline() -> None:
    def broken(*arguments: Any) -> None:
        raise KeyError("a defect")

    for wait in ("repair", "drain"):
        stage = Stage(1, 4)
        stage.pool.engines[0].engine.collect = broken  # type: ignore[attr-defined]
        stage.submit(turns(0, 2, [1], 3))
        stage.events.spawn(raises())
        with pytest.raises(KeyError, match="a defect"):
            for _ in range(10):
                stage.all_go_on()
                getattr(stage.dispatcher, wait)()
        assert stage.events.time < DEADLINE


async def raises() -> None:
    raise KeyError("a defect")


def test_tasks_sampled_in_parts_have_the_seeds_that_they_have_together() -> None:
    def seeds(parts: list[range]) -> list[int]:
        stage = Stage(1, 4)
        sampled_seeds: list[int] = []
        sample_turn = stage.dispatcher.sample_turn

        async def note_seed(request: TurnRequest, **options: bool) -> Completion:
            sampled_seeds.append(request.seed)
            return await sample_turn(request, **options)

        stage.dispatcher.sample_turn = note_seed  # type: ignore[method-assign,assignment]
        for part in parts:
            stage.dispatcher.sample(stage.runner, SAMPLING, [TASKS[place] for place in part], 4, part.start)
        return sampled_seeds

    assert seeds([range(1), range(1, 3)]) == seeds([range(3)]) != []


def hold_sequences(stage: Stage, sequences: int) -> None:
    """Have the caches of all engines hold this number of sequences, and the dispatcher know."""
    for worker in stage.pool.engines:
        worker.engine.hold(sequences)  # type: ignore[attr-defined]
    # Nothing is sampled: a call that collects returns when its patience is over.
    stage.events.let_pass(2.0)


def next_turn(request: TurnRequest) -> TurnRequest:
    return replace(request, id=RequestId(request.id.rollout, request.id.turn + 1))


class Talk:
    """Conversations of a few turns each: the next one is submitted some time after the one before was answered."""

    def __init__(self, stage: Stage, random: Random, last: int) -> None:
        self.stage = stage
        self.random = random
        # Number of the last turn.
        self.last = last
        self.acting: list[TurnRequest] = []
        self.answered_ids: list[RequestId] = []
        # Name of the engine that was seen to sample each request.
        self.engine_names: dict[RequestId, str] = {}

    def look(self) -> None:
        for worker in self.stage.pool.engines:
            for request in worker.engine.active:  # type: ignore[attr-defined]
                self.engine_names[request.id] = worker.name

    def go_on(self) -> None:
        """Have a while pass; some of what was answered goes on."""
        self.look()
        self.stage.all_go_on()
        self.look()
        self.answered_ids += self.stage.answered_ids
        self.stage.finish(
            [request_id.rollout for request_id in self.stage.answered_ids if request_id.turn == self.last]
        )
        self.acting += [request for request, _ in self.stage.answers if request.id.turn < self.last]
        self.stage.answers.clear()
        ready = [request for request in self.acting if self.random.random() < 0.5]
        self.acting = [request for request in self.acting if request not in ready]
        self.stage.submit([next_turn(request) for request in ready], turns_follow=True)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 12), st.booleans(), st.integers(0, 1 << 30), st.booleans())
def test_the_turns_of_a_rollout_stay_on_its_engine_while_it_lives(
    engines: int, at_a_time: int, count: int, dies: bool, seed: int, together: bool
) -> None:
    stage = Stage(engines, at_a_time, together)
    random = Random(seed)
    size = 1 + seed % 3
    hold_sequences(stage, random.randint(0, 3 * at_a_time))
    requests: list[TurnRequest] = []
    for group in range(count):
        requests += turns(group, size, [1], random.randint(1, 4))
    talk = Talk(stage, random, last=3)
    stage.submit(requests, turns_follow=True)
    dies_at = random.randint(1, 12) if dies else 0
    moved: set[str] = set()
    most_turns = 0
    idle_steps = 0
    for number in range(1, 400):
        if number == dies_at:
            lost = stage.pool.engines[0]
            moved = {str(request_id.rollout) for request_id, name in talk.engine_names.items() if name == lost.name}
            lost.kill()
        if stage.dispatcher.repair():
            moved |= set(map(str, stage.restarted))
        talk.go_on()
        most_turns = max(most_turns, *(len(stage.list_sampling(index)) for index in range(engines)))
        # Ten further steps: a turn that is answered twice would be by then.
        is_idle = len(talk.answered_ids) >= 4 * len(requests) and number > dies_at
        idle_steps = idle_steps + 1 if is_idle else 0
        if idle_steps == 10:
            break
    expected: list[RequestId] = []
    for request in requests:
        expected += [RequestId(request.id.rollout, number) for number in range(4)]
    assert sorted(map(str, talk.answered_ids)) == sorted(map(str, expected))
    # A group begins while there is room for one rollout; later turns, up to the same number, wait in their engine.
    assert most_turns <= max(2 * at_a_time, at_a_time + size - 1) + (size - 1 if together else 0)
    assert [engine.load for engine in stage.dispatcher.engines()] == [0] * engines
    for request in requests:
        homes = {talk.engine_names[RequestId(request.id.rollout, number)] for number in range(4)}
        assert len(homes) == 1 or str(request.id.rollout) in moved


def test_later_turns_go_to_their_engine_at_once_up_to_as_many_as_it_decodes_and_then_before_new_groups() -> None:
    stage = Stage(2, at_a_time=1)
    stage.submit([*turns(0, 2, [1], 1), turn(1, longest=2), turn(2, longest=9), turn(3, longest=1)], turns_follow=True)
    for _ in range(2):
        stage.all_go_on()
    assert [request.id.rollout.group for request, _ in stage.answers] == [0, 0, 1]
    # Engine 0 went on with another group, engine 1 is about to be free.
    assert (stage.list_sampling(0), stage.list_sampling(1)) == ([(2, 0)], [(3, 0)])
    later = [next_turn(request) for request, _ in stage.answers[:2]]
    stage.submit([turn(4, longest=1), *later], turns_follow=True)
    # One more than it decodes waits in engine 0, the other here; engine 1 takes the new group.
    assert stage.list_sampling(0) == [(2, 0), (0, 0)]
    for _ in range(14):
        stage.all_go_on()
    order = [request.id for request, _ in stage.answers[3:]]
    assert order.index(later[0].id) < order.index(later[1].id) and len(order) == 5


@pytest.mark.parametrize(
    ("together", "sequences", "episodes"), [(True, 3, 3), (True, 9, 4), (True, 0, 2), (False, 9, 2)]
)
def test_a_step_that_is_waited_for_as_a_whole_begins_as_many_episodes_as_the_cache_holds(
    together: bool, sequences: int, episodes: int
) -> None:
    stage = Stage(1, at_a_time=2, together=together)
    hold_sequences(stage, sequences)
    stage.submit([turn(group, longest=1 + group % 2) for group in range(8)], turns_follow=True)
    assert stage.list_sampling(0) == [(group, 0) for group in range(episodes)]
    # Rollouts of one turn are as many as the engine decodes.
    single = Stage(1, at_a_time=2, together=together)
    hold_sequences(single, sequences)
    single.submit([turn(group) for group in range(8)])
    assert len(single.list_sampling(0)) == 2


def test_an_engine_that_has_room_begins_episodes_while_environments_answer() -> None:
    stage = Stage(1, at_a_time=2, together=True)
    hold_sequences(stage, 3)
    stage.submit([turn(group, longest=1 if group < 2 else 9) for group in range(6)], turns_follow=True)
    stage.all_go_on()
    # Two wait for their environment. One is sampled, so another begins, beyond what the cache holds.
    assert [request.id.rollout.group for request, _ in stage.answers] == [0, 1]
    assert [group for group, _ in stage.list_sampling(0)] == [2, 3]
    stage.finish([request.id.rollout for request, _ in stage.answers])
    assert [group for group, _ in stage.list_sampling(0)] == [2, 3, 4]


def test_nobody_remembers_the_engine_of_a_rollout_that_is_over() -> None:
    stage = Stage(1, at_a_time=4)
    stage.submit(turns(0, 3, [1], 2), turns_follow=True)
    for _ in range(4):
        stage.all_go_on()
    references = [weakref.ref(request.id.rollout) for request, _ in stage.answers]
    FakeWorker.forget_all()
    stage.tasks.clear()
    stage.finish([request.id.rollout for request, _ in stage.answers])
    stage.answers.clear()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_requests_gather_on_their_way_to_an_engine_that_has_more_than_it_decodes() -> None:
    stage = Stage(1, at_a_time=4, together=True)
    hold_sequences(stage, 100)
    stage.submit([turn(group, longest=9) for group in range(6)], turns_follow=True)
    # The engine has six: it decodes four, and two wait.
    assert len(stage.list_sampling(0)) == 6

    def submit_later_turn(group: int) -> None:
        stage.submit([next_turn(turn(group, longest=9))], turns_follow=True)

    submit_later_turn(6)
    stage.events.let_pass(0.12)
    submit_later_turn(7)
    assert len(stage.list_sampling(0)) == 6
    stage.events.let_pass(0.12)
    assert [group for group, _ in stage.list_sampling(0)] == [*range(8)]
    # A cancelled turn is told at once, and turns that were ordered before go before it.
    stage.cancel([turn(group, longest=9) for group in range(4)])
    assert [group for group, _ in stage.list_sampling(0)] == [4, 5, 6, 7]
    stage.finish([turn(group).id.rollout for group in range(4)])
    # The engine has four, all that it decodes: the fifth must not wait.
    submit_later_turn(8)
    assert [group for group, _ in stage.list_sampling(0)] == [4, 5, 6, 7, 8]


def test_an_engine_that_answers_no_call_keeps_no_other_from_its_work() -> None:
    stage = Stage(2, at_a_time=2)
    stuck: Any = stage.pool.engines[0]
    stuck.stuck = True
    stage.submit([turn(group, longest=1) for group in range(9)])
    for _ in range(6):
        stage.all_go_on()
    # Two are with the engine that is stuck.
    assert len(stage.answers) == 7
    time_before = stage.events.time
    assert "silent for" in stage.dispatcher.describe() and stage.events.time == time_before


@dataclass(eq=False)
class Loaded:
    """An engine with a load."""

    index: int
    load: int = 0


def test_the_engine_with_the_fewest_tokens_ahead_is_chosen_whatever_happened_before() -> None:
    random = Random(7)
    engines = [Loaded(index) for index in range(9)]
    free_engines: Any = LeastLoaded()
    takes: dict[int, bool] = {}
    for _ in range(5_000):
        engine = random.choice(engines)
        engine.load = random.randrange(40)
        takes[engine.index] = random.random() < 0.7
        free_engines.note(engine, takes[engine.index])
        taking = [engine for engine in engines if takes.get(engine.index)]
        assert free_engines.least() is min(taking, key=lambda engine: (engine.load, engine.index), default=None)
