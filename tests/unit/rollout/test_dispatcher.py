"""The dispatcher on engines that step on command: the engine of each request, the receiver of each answer, the
queue."""

import gc
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlctl.bench.simulated_engine import VirtualClock
from rlctl.bench.virtual_events import VirtualEvents
from rlctl.data.tasks import Task
from rlctl.generation import pool
from rlctl.generation.pool import EngineSlot, GeneratorPool
from rlctl.generation.requests import RequestId, TurnRequest
from rlctl.generation.vllm import active_requests
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.engine_queue import Answer
from rlctl.rollout.players.single_turn import SingleTurnPlayer
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import Sampling
from tests.turns import turn, turns
from tests.unit.rollout.fake_engine import FakeRefit, FakeWorker, answer

DEADLINE = 10.0
RUN: Any = SimpleNamespace(deadline_s=DEADLINE, explain_after_s=2.0)
TASKS = [Task(f"v{i}", [5, 9], "", None) for i in range(3)]
SAMPLING = Sampling("validation", 0, 3, 2, 8, 1.0)


class Mine:
    """Submitter that keeps its answers."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.again: list[RequestId] = []

    def completed(self, answers: list[Answer]) -> None:
        self.answers += answers

    def restarted(self, requests: list[TurnRequest]) -> None:
        self.again += [request.id for request in requests]


class Stage:
    """A pool of fake engines at version 0, and a dispatcher; answers have the length of their `max_new_tokens`."""

    def __init__(self, engines: int, at_a_time: int, together: bool = False) -> None:
        FakeWorker.made = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.happen: Callable[[], None] = self.all_go_on
        self.clock = VirtualClock(lambda: self.happen())
        spec: Any = SimpleNamespace(
            kind="vllm", tensor_parallel_size=1, max_num_seqs=at_a_time, sleeps=True, dtype="float32", version=-1
        )
        slots = [EngineSlot({})] * engines
        self.pool = GeneratorPool(spec, slots, "", DEADLINE, 3, lambda kind, **what: self.events.append((kind, what)))
        self.refit: Any = FakeRefit(lambda: "", lambda: None)
        self.pool.connect(self.refit)
        self.pool.sync(0)
        emit = self.pool._emit
        self.dispatcher = RolloutDispatcher(self.pool, RUN, emit, self.clock, together=together)
        self.runner = RolloutRunner(SingleTurnPlayer(), self.dispatcher, VirtualEvents(self.clock))

    def threads(self) -> None:
        with self.clock.on_a_thread():
            for step in self.clock.steps:
                step()

    def all_go_on(self) -> None:
        self.clock.time += 1.0
        for worker in self.pool.engines:
            if worker.steps:  # type: ignore[attr-defined]
                worker.engine.step()  # type: ignore[attr-defined]
        self.threads()

    def at(self, index: int) -> list[tuple[int, int]]:
        """(group, index) of an engine's requests, in its order."""
        worker: Any = self.pool.engines[index]
        ids = [each.id.rollout for each in worker.engine.active]
        return [(each.group, each.index) for each in ids]


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Worker", FakeWorker)
    answer(monkeypatch, lambda request: request.max_new_tokens)
    monkeypatch.setattr(active_requests, "GATHER_S", 0.0)


groups = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 64)), min_size=1, max_size=30)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(groups, st.integers(1, 4))
def test_groups_stay_whole_in_order_and_loads_are_even(shape: list[tuple[int, int]], engines: int) -> None:
    stage = Stage(engines, at_a_time=1000)
    requests = [one for i, (size, longest) in enumerate(shape) for one in turns(i, size, [1], longest)]
    stage.dispatcher.submit(requests, Mine())
    for _ in range(4):
        stage.threads()
    shares = [stage.at(index) for index in range(engines)]
    assert sorted(one for share in shares for one in share) == sorted(
        (i, n) for i, (size, _) in enumerate(shape) for n in range(size)
    )
    assert all(share == sorted(share) for share in shares)
    assert len({group for share in shares for group in {g for g, _ in share}}) == len(shape)
    loads = [sum(shape[group][1] for group, _ in share) for share in shares]
    # List scheduling (Graham 1966): at most the mean and the costliest group.
    costliest = max(size * longest for size, longest in shape)
    assert max(loads) - min(loads) <= costliest


def test_an_engine_gets_what_it_decodes_at_a_time_and_room_as_each_rollout_ends() -> None:
    stage, mine = Stage(1, at_a_time=3), Mine()
    short = [turn(0, 0, longest=1), turn(0, 1, longest=5)]
    stage.dispatcher.submit([*short, *turns(1, 2, [1], 5), *turns(2, 2, [1], 5)], mine)
    stage.threads()
    # Two are fewer than three, so a second group begins; four are not.
    assert stage.at(0) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    stage.all_go_on()
    assert [request.id for request, _ in mine.answers] == [turn(0, 0).id]
    stage.threads()
    assert (2, 0) not in stage.at(0)
    for _ in range(4):
        stage.all_go_on()
    stage.threads()
    assert len(mine.answers) == 4 and stage.at(0) == [(2, 0), (2, 1)]


def test_turns_of_a_rollout_that_are_submitted_together_go_to_the_engine_that_has_its_prefix() -> None:
    stage, mine = Stage(2, at_a_time=4), Mine()
    first, other = turn(0, 0), turn(1, 0)
    waves = [[replace(each, id=RequestId(each.id.rollout, number)) for number in range(6)] for each in (first, other)]
    for wave in waves:
        stage.dispatcher.submit(wave[:3], mine)
    stage.threads()
    assert [set(stage.at(index)) for index in range(2)] == [{(0, 0)}, {(1, 0)}]
    for wave in waves[::-1]:
        stage.dispatcher.submit(wave[3:], mine)
    stage.threads()
    assert [stage.at(index) for index in range(2)] == [[(0, 0)] * 6, [(1, 0)] * 6]


def test_validation_goes_ahead_of_what_waits_and_each_gets_its_own_answers() -> None:
    stage, mine = Stage(1, at_a_time=2), Mine()
    stage.dispatcher.submit([one for group in range(6) for one in turns(group, 2, [1], 4)], mine)
    found = stage.dispatcher.sample(stage.runner, SAMPLING, TASKS, 0)
    assert [group.task for group in found] == TASKS
    assert [[one.id.index for one in group.rollouts] for group in found] == [[0, 1]] * 3
    assert all(one.id.purpose == "validation" and one.num_sampled == 8 for g in found for one in g.rollouts)
    # Running requests went on; waiting ones still wait.
    assert {request.id.rollout.group for request, _ in mine.answers} == {0}
    assert (
        "8 rollouts not begun" in stage.dispatcher.describe() or "10 rollouts not begun" in stage.dispatcher.describe()
    )


def test_a_validation_outlives_its_engine() -> None:
    stage, lost = Stage(2, at_a_time=4), list[bool]()

    def kill_one() -> None:
        if not lost and stage.at(0):
            lost.append(True)
            stage.pool.engines[0].kill()
        stage.all_go_on()

    stage.happen = kill_one
    found = stage.dispatcher.sample(stage.runner, SAMPLING, TASKS, 0)
    assert lost and [len(group.rollouts) for group in found] == [2, 2, 2]
    assert [kind for kind, _ in stage.events if kind != "warning"] == ["engine_lost", "engine_restarted"]


def test_a_validation_that_gets_nothing_is_explained_and_ends_at_its_deadline() -> None:
    stage = Stage(1, at_a_time=4)

    def nothing_comes() -> None:
        # Engines that are rebuilt, and do nothing either.
        for worker in stage.pool.engines:
            worker.hangs = True  # type: ignore[attr-defined]
        stage.clock.time += 1.0
        stage.threads()

    stage.happen = nothing_comes
    with pytest.raises(RuntimeError, match=r"waited 10 s for engine-0 .* generation\.max_restarts=3 are used up"):
        stage.dispatcher.sample(stage.runner, SAMPLING, TASKS, 0)
    warnings = [what["what"] for kind, what in stage.events if kind == "warning"]
    assert any(
        "s without a new group: validation waits for 6 rollouts; engine-0 samples 4" in what for what in warnings
    )


def test_sampling_on_a_sleeping_pool_is_an_error() -> None:
    stage = Stage(1, at_a_time=4)
    stage.pool.asleep = True
    with pytest.raises(RuntimeError, match="the generator sleeps: sync it with the trainer before it samples"):
        stage.dispatcher.submit([turn(0)], Mine())
    with pytest.raises(RuntimeError, match="the generator sleeps"):
        stage.dispatcher.sample(stage.runner, SAMPLING, TASKS, 0)


def test_what_is_aborted_is_delivered_no_more_wherever_it_was() -> None:
    stage, mine = Stage(1, at_a_time=2), Mine()
    requests = [one for group in range(3) for one in turns(group, 2, [1], 3)]
    stage.dispatcher.submit(requests, mine)
    stage.threads()
    assert set(stage.dispatcher.abort([request.id for request in requests[:4]])) == {r.id for r in requests[:4]}
    for _ in range(6):
        stage.all_go_on()
    assert {request.id for request, _ in mine.answers} == {request.id for request in requests[4:]}
    # A finished request cannot be aborted.
    assert stage.dispatcher.abort([request.id for request in requests]) == []


def test_a_request_that_was_aborted_and_ended_begins_again_unharmed() -> None:
    stage, mine = Stage(1, at_a_time=2), Mine()
    request = turn(0, longest=3)
    stage.dispatcher.submit([request], mine)
    stage.threads()
    worker: Any = stage.pool.engines[0]
    # It ends on the engine, and is collected, before the order to stop it arrives.
    for _ in range(3):
        worker.engine.step()

    def it_passes() -> None:
        stage.clock.time += 6.0

    stage.happen = it_passes
    stage.dispatcher.abort([request.id])
    collect = stage.clock.steps[0]
    with stage.clock.on_a_thread():
        collect()
    assert not stage.dispatcher.drain() and mine.answers == []
    stage.threads()
    assert stage.dispatcher.drain()
    stage.dispatcher.resume()
    stage.dispatcher.submit([request], mine)
    for _ in range(4):
        stage.all_go_on()
    assert [request.id for request, _ in mine.answers] == [request.id]


def test_it_is_known_how_many_tokens_were_sampled_of_what_was_aborted() -> None:
    stage, mine = Stage(1, at_a_time=4), Mine()
    requests = [turn(0, longest=9), turn(1, longest=9), turn(2, longest=2)]
    stage.dispatcher.submit(requests, mine)
    stage.threads()
    worker: Any = stage.pool.engines[0]
    for _ in range(3):
        worker.engine.step()
    stage.dispatcher.abort([request.id for request in requests[1:]])
    # One went on for another step; one had ended, and was collected before the order came.
    assert stage.dispatcher.aborted_tokens == 4 + 2
    stage.happen = stage.threads
    stage.dispatcher.abort([requests[0].id])
    assert stage.dispatcher.aborted_tokens == 4 + 2 + 4


def test_drained_nothing_begins_and_resumed_it_does() -> None:
    stage, mine = Stage(1, at_a_time=1), Mine()
    stage.dispatcher.submit([turn(0, longest=2), turn(1, longest=2)], mine)
    stage.threads()
    assert not stage.dispatcher.drain()
    for _ in range(4):
        stage.all_go_on()
    assert stage.dispatcher.drain() and len(mine.answers) == 1
    stage.dispatcher.resume()
    for _ in range(4):
        stage.all_go_on()
    assert len(mine.answers) == 2


def test_an_error_in_a_thread_ends_the_wait_at_once_and_not_at_the_deadline() -> None:
    stage = Stage(1, 4)

    class Broken(Mine):
        def completed(self, answers: list[Answer]) -> None:
            raise KeyError("a defect")

    stage.dispatcher.submit(turns(0, 2, [1], 3), Broken())
    for wait in (stage.dispatcher.repair, stage.dispatcher.drain):
        with pytest.raises(KeyError, match="a defect"):
            for _ in range(10):
                stage.clock.anything_happens()
                wait()
    assert stage.clock.time < DEADLINE


def test_tasks_sampled_in_parts_have_the_seeds_that_they_have_together() -> None:
    def seeds(parts: list[range]) -> list[int]:
        stage, seen = Stage(1, 4), list[int]()
        submit = stage.dispatcher.submit
        stage.dispatcher.submit = lambda requests, *rest, **how: (  # type: ignore[method-assign]
            seen.extend(each.seed for each in requests),
            submit(requests, *rest, **how),
        )[1]
        for part in parts:
            stage.dispatcher.sample(stage.runner, SAMPLING, [TASKS[place] for place in part], 4, part.start)
        return seen

    assert seeds([range(1), range(1, 3)]) == seeds([range(3)]) != []


def holds(stage: Stage, sequences: int) -> None:
    """Have the caches of all engines hold this many sequences, and the dispatcher know."""
    for worker in stage.pool.engines:
        worker.engine.hold(sequences)  # type: ignore[attr-defined]
    for queue in stage.dispatcher._queues:
        queue.stats = replace(queue.stats, holds=sequences)


def next_turn(request: TurnRequest) -> TurnRequest:
    return replace(request, id=RequestId(request.id.rollout, request.id.turn + 1))


class Talk:
    """Conversations of a few turns each: the next one is submitted some time after the one before was answered."""

    def __init__(self, stage: Stage, random: Random, last: int) -> None:
        self.stage, self.random, self.last, self.mine = stage, random, last, Mine()
        self.acting: list[TurnRequest] = []
        self.answered: list[RequestId] = []
        # Engine by request, as seen on the engines.
        self.seen: dict[RequestId, str] = {}

    def go_on(self) -> None:
        """Have a while pass; some answered rollouts go on."""
        self.stage.all_go_on()
        for worker in self.stage.pool.engines:
            for active in worker.engine.active:  # type: ignore[attr-defined]
                self.seen[active.id] = worker.name
        self.answered += [request.id for request, _ in self.mine.answers]
        self.stage.dispatcher.finish([r.id.rollout for r, _ in self.mine.answers if r.id.turn == self.last])
        self.acting += [request for request, _ in self.mine.answers if request.id.turn < self.last]
        self.mine.answers.clear()
        ready = [each for each in self.acting if self.random.random() < 0.5]
        self.acting = [each for each in self.acting if each not in ready]
        self.stage.dispatcher.submit([next_turn(each) for each in ready], self.mine, more=True)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 12), st.booleans(), st.integers(0, 1 << 30), st.booleans())
def test_the_turns_of_a_rollout_stay_on_its_engine_while_it_lives(
    engines: int, at_a_time: int, count: int, dies: bool, seed: int, together: bool
) -> None:
    stage, random, size = Stage(engines, at_a_time, together), Random(seed), 1 + seed % 3
    holds(stage, random.randint(0, 3 * at_a_time))
    requests = [one for group in range(count) for one in turns(group, size, [1], random.randint(1, 4))]
    talk, most = Talk(stage, random, last=3), 0
    stage.dispatcher.submit(requests, talk.mine, more=True)
    dies_at, moved = (random.randint(1, 12) if dies else 0), set[str]()
    for number in range(1, 400):
        if number == dies_at:
            lost = stage.pool.engines[0]
            moved = {str(each.rollout) for each, name in talk.seen.items() if name == lost.name}
            lost.kill()
        if stage.dispatcher.repair():
            moved |= {str(each.rollout) for each in talk.mine.again}
        talk.go_on()
        most = max(most, *(len(stage.at(index)) for index in range(engines)))
    assert sorted(map(str, talk.answered)) == sorted(f"{r.id}"[:-1] + str(t) for r in requests for t in range(4))
    # A group begins while there is room for one rollout; later turns, up to the same number, wait in their engine.
    assert most <= max(2 * at_a_time, at_a_time + size - 1) + together * (size - 1)
    assert not any(queue.episodes for queue in stage.dispatcher._queues)
    for request in requests:
        homes = {talk.seen[RequestId(request.id.rollout, t)] for t in range(4)}
        assert len(homes) == 1 or str(request.id.rollout) in moved


def test_later_turns_go_to_their_engine_at_once_up_to_as_many_as_it_decodes_and_then_before_new_groups() -> None:
    stage, mine = Stage(2, at_a_time=1), Mine()
    stage.dispatcher.submit([*turns(0, 2, [1], 1), turn(1, longest=2), turn(2, longest=9), turn(3, longest=1)], mine)
    for _ in range(3):
        stage.all_go_on()
    assert [request.id.rollout.group for request, _ in mine.answers] == [0, 0, 1]
    # Engine 0 went on with another group, engine 1 is about to be free.
    assert (stage.at(0), stage.at(1)) == ([(2, 0)], [(3, 0)])
    later = [next_turn(request) for request, _ in mine.answers[:2]]
    stage.dispatcher.submit([turn(4, longest=1), *later], mine)
    stage.all_go_on()
    # One more than it decodes waits in engine 0, the other here; engine 1 takes the new group.
    assert stage.at(0) == [(2, 0), (0, 0)]
    for _ in range(14):
        stage.all_go_on()
    order = [request.id for request, _ in mine.answers[3:]]
    assert order.index(later[0].id) < order.index(later[1].id) and len(order) == 5


@pytest.mark.parametrize(("together", "kept", "begun"), [(True, 3, 3), (True, 9, 4), (True, 0, 2), (False, 9, 2)])
def test_a_step_that_is_waited_for_as_a_whole_begins_as_many_episodes_as_the_cache_holds(
    together: bool, kept: int, begun: int
) -> None:
    stage, mine = Stage(1, at_a_time=2, together=together), Mine()
    holds(stage, kept)
    stage.dispatcher.submit([turn(group, longest=1 + group % 2) for group in range(8)], mine, more=True)
    stage.threads()
    assert stage.at(0) == [(group, 0) for group in range(begun)]
    # Rollouts of one turn are as many as the engine decodes.
    single = Stage(1, at_a_time=2, together=together)
    holds(single, kept)
    single.dispatcher.submit([turn(group) for group in range(8)], Mine())
    single.threads()
    assert len(single.at(0)) == 2


def test_an_engine_that_has_room_begins_episodes_while_environments_answer() -> None:
    stage, mine = Stage(1, at_a_time=2, together=True), Mine()
    holds(stage, 3)
    stage.dispatcher.submit([turn(group, longest=1 if group < 2 else 9) for group in range(6)], mine, more=True)
    stage.threads()
    stage.all_go_on()
    # Two wait for their environment. One is sampled, so another begins, beyond the room of the cache.
    assert [request.id.rollout.group for request, _ in mine.answers] == [0, 1]
    assert [group for group, _ in stage.at(0)] == [2, 3]
    stage.dispatcher.finish([request.id.rollout for request, _ in mine.answers])
    stage.threads()
    assert [group for group, _ in stage.at(0)] == [2, 3, 4]


def test_nobody_remembers_the_engine_of_a_rollout_that_is_over() -> None:
    stage, mine = Stage(1, at_a_time=4), Mine()
    stage.dispatcher.submit(turns(0, 3, [1], 2), mine)
    for _ in range(4):
        stage.all_go_on()
    assert len(mine.answers) == 3 and len(stage.dispatcher._homes) == 3
    mine.answers.clear()
    gc.collect()
    assert len(stage.dispatcher._homes) == 0


def test_requests_gather_on_their_way_to_an_engine_that_has_more_than_it_decodes() -> None:
    stage, mine = Stage(1, at_a_time=4, together=True), Mine()
    holds(stage, 100)
    stage.dispatcher.submit([turn(group, longest=9) for group in range(6)], mine, more=True)
    stage.threads()
    # The engine has six, two of which wait inside.
    assert len(stage.at(0)) == 6

    def later(group: int) -> None:
        first = turn(group, longest=9)
        stage.dispatcher.submit([replace(first, id=RequestId(first.id.rollout, 1))], mine, more=True)

    later(6)
    stage.clock.time += 0.12
    later(7)
    stage.threads()
    assert len(stage.at(0)) == 6 and len(stage.dispatcher._queues[0].orders) == 1
    stage.clock.time += 0.12
    stage.threads()
    assert [group for group, _ in stage.at(0)] == [*range(8)]
    # An abandoned request is told at once, after all earlier orders.
    stage.dispatcher.abort([turn(0).id, turn(1).id])
    stage.dispatcher.abort([turn(2).id, turn(3).id])
    stage.threads()
    assert [group for group, _ in stage.at(0)] == [4, 5, 6, 7]
    # The engine has four, all that it decodes: the fifth must not wait.
    later(8)
    stage.threads()
    assert [group for group, _ in stage.at(0)] == [4, 5, 6, 7, 8]
