"""The dispatcher with engines that step on command: which engine gets a request, who gets an answer, and the queue."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlctl.data.cursor import Cursor, TaskSource
from rlctl.generation import generator_pool
from rlctl.generation.requests import Completion, RequestId, TurnRequest
from rlctl.preflight.load import load
from rlctl.rollout.buffer import RolloutBuffer
from rlctl.rollout.turn_placement import LeastLoaded
from tests.turns import turn, turns
from tests.unit.rollout.dispatcher_stage import DEADLINE, SAMPLING, TASKS, Stage, fake_engines
from tests.unit.rollout.fake_engine import FakeWorker

__all__ = ["fake_engines"]

pytestmark = pytest.mark.usefixtures("fake_engines")


def turns_of_groups(groups: Iterable[int], size: int, longest: int) -> list[TurnRequest]:
    """Return the requests of the groups with these numbers."""
    requests: list[TurnRequest] = []
    for group in groups:
        requests += turns(group, size, [1], longest)
    return requests


# For each group (number of rollouts, tokens of each answer).
shapes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 64)), min_size=1, max_size=30)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(shapes, st.integers(1, 4))
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
    stage.submit([*short, *turns_of_groups([1, 2], 2, 5)])
    # The engine decodes three: with two rollouts a second group begins, with four no third group.
    assert stage.list_sampling(0) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    stage.step_engines()
    assert stage.answered_ids == [turn(0, 0).id]
    assert (2, 0) not in stage.list_sampling(0)
    for _ in range(4):
        stage.step_engines()
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
    # Only requests that were running were answered. The others still wait.
    assert {request.id.rollout.group for request, _ in stage.answers} == {0}
    description = stage.dispatcher.describe()
    assert "8 rollouts not begun" in description or "10 rollouts not begun" in description


def test_a_validation_outlives_its_engine() -> None:
    stage = Stage(2, at_a_time=4)
    is_lost = False

    def kill_one() -> None:
        nonlocal is_lost
        if not is_lost and stage.list_sampling(0):
            is_lost = True
            stage.pool.engines[0].kill()
        stage.step_engines()

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

    def hang_engines() -> None:
        # Engines that are rebuilt do nothing either.
        for worker in stage.pool.engines:
            worker.hangs = True  # type: ignore[attr-defined]
        stage.events.let_pass(1.0)

    stage.happen = hang_engines
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
        stage.step_engines()
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
        stage.step_engines()
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
    # The other engine did nothing for as long, so it is replaced too.
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
    stage.step_engines()
    stage.cancel(requests[:1])
    assert stage.dispatcher.aborted_tokens == 3 + 2 + 4


def test_drained_nothing_begins_and_resumed_it_does() -> None:
    stage = Stage(1, at_a_time=1)
    stage.submit([turn(0, longest=2), turn(1, longest=2)])
    assert not stage.dispatcher.drain()
    for _ in range(4):
        stage.step_engines()
    assert stage.dispatcher.drain() and len(stage.answers) == 1
    stage.dispatcher.resume()
    for _ in range(4):
        stage.step_engines()
    assert len(stage.answers) == 2


def test_a_defect_on_the_loop_ends_the_wait_at_once_and_not_at_the_deadline() -> None:
    def fail(*arguments: Any) -> None:
        raise KeyError("a defect")

    for wait in ("repair", "drain"):
        stage = Stage(1, 4)
        stage.pool.engines[0].engine.collect = fail  # type: ignore[attr-defined]
        stage.submit(turns(0, 2, [1], 3))
        stage.events.spawn(fail_on_the_loop())
        with pytest.raises(KeyError, match="a defect"):
            for _ in range(10):
                stage.step_engines()
                getattr(stage.dispatcher, wait)()
        assert stage.events.time < DEADLINE


async def fail_on_the_loop() -> None:
    raise KeyError("a defect")


def test_tasks_sampled_in_parts_have_the_seeds_that_they_have_together() -> None:
    def sample_parts(parts: list[range]) -> list[int]:
        """Sample the tasks of each part; return the seeds of the requests."""
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

    seeds_of_parts = sample_parts([range(1), range(1, 3)])
    assert seeds_of_parts == sample_parts([range(3)]) != []


def test_an_engine_that_answers_no_call_keeps_no_other_from_its_work() -> None:
    stage = Stage(2, at_a_time=2)
    stuck: Any = stage.pool.engines[0]
    stuck.stuck = True
    stage.submit([turn(group, longest=1) for group in range(9)])
    for _ in range(6):
        stage.step_engines()
    # Two are with the engine that is stuck.
    assert len(stage.answers) == 7
    time_before = stage.events.time
    assert "silent for" in stage.dispatcher.describe() and stage.events.time == time_before


@dataclass(eq=False)
class LoadedEngine:
    """Stand-in for an engine with a given load."""

    index: int
    load: int = 0


def test_the_engine_with_the_fewest_tokens_ahead_is_chosen_whatever_happened_before() -> None:
    random = Random(7)
    engines = [LoadedEngine(index) for index in range(9)]
    free_engines: Any = LeastLoaded()
    takes_turns: dict[int, bool] = {}
    for _ in range(5_000):
        engine = random.choice(engines)
        engine.load = random.randrange(40)
        takes_turns[engine.index] = random.random() < 0.7
        free_engines.note(engine, takes_turns[engine.index])
        taking = [engine for engine in engines if takes_turns.get(engine.index)]
        least_loaded = min(taking, key=lambda engine: (engine.load, engine.index), default=None)
        assert free_engines.least() is least_loaded
