"""The dispatcher with rollouts of several turns: which engine gets a turn, and how many episodes begin."""

import gc
import weakref
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlctl.generation.requests import RequestId, TurnRequest
from tests.turns import turn, turns
from tests.unit.rollout.dispatcher_stage import Stage, fake_engines
from tests.unit.rollout.fake_engine import FakeWorker

__all__ = ["fake_engines"]

pytestmark = pytest.mark.usefixtures("fake_engines")


def hold_sequences(stage: Stage, sequences: int) -> None:
    """Let all engines report room for `sequences` sequences in the cache, and let the dispatcher read the reports."""
    for worker in stage.pool.engines:
        worker.engine.hold(sequences)  # type: ignore[attr-defined]
    # Nothing is sampled: a call that collects returns when its patience is over.
    stage.events.let_pass(2.0)


def make_next_turn(request: TurnRequest) -> TurnRequest:
    return replace(request, id=RequestId(request.id.rollout, request.id.turn + 1))


class Conversations:
    """Conversations of a few turns each. The next turn is submitted some time after the one before was answered."""

    def __init__(self, stage: Stage, random: Random, last_turn: int) -> None:
        self.stage = stage
        self.random = random
        self.last_turn = last_turn
        # Answered requests whose environment has not acted yet.
        self.acting: list[TurnRequest] = []
        self.answered_ids: list[RequestId] = []
        # Name of the engine that was seen to sample each request.
        self.engine_names: dict[RequestId, str] = {}

    def note_engines(self) -> None:
        """Record the engine that samples each request."""
        for worker in self.stage.pool.engines:
            for request in worker.engine.active:  # type: ignore[attr-defined]
                self.engine_names[request.id] = worker.name

    def go_on(self) -> None:
        """Let some time pass, after which some conversations submit their next turn."""
        self.note_engines()
        self.stage.step_engines()
        self.note_engines()
        answered_ids = self.stage.answered_ids
        self.answered_ids += answered_ids
        self.stage.finish([request_id.rollout for request_id in answered_ids if request_id.turn == self.last_turn])
        self.acting += [request for request, _ in self.stage.answers if request.id.turn < self.last_turn]
        self.stage.answers.clear()
        ready = [request for request in self.acting if self.random.random() < 0.5]
        self.acting = [request for request in self.acting if request not in ready]
        self.stage.submit([make_next_turn(request) for request in ready], turns_follow=True)


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
    conversations = Conversations(stage, random, last_turn=3)
    stage.submit(requests, turns_follow=True)
    dies_at = random.randint(1, 12) if dies else 0
    moved: set[str] = set()
    most_turns = 0
    idle_steps = 0
    for number in range(1, 400):
        if number == dies_at:
            lost = stage.pool.engines[0]
            engine_names = conversations.engine_names
            moved = {str(request_id.rollout) for request_id, name in engine_names.items() if name == lost.name}
            lost.kill()
        if stage.dispatcher.repair():
            moved |= set(map(str, stage.restarted))
        conversations.go_on()
        most_turns = max(most_turns, *(len(stage.list_sampling(index)) for index in range(engines)))
        # Ten further steps: a turn that is answered twice would be by then.
        is_idle = len(conversations.answered_ids) >= 4 * len(requests) and number > dies_at
        idle_steps = idle_steps + 1 if is_idle else 0
        if idle_steps == 10:
            break
    expected: list[RequestId] = []
    for request in requests:
        expected += [RequestId(request.id.rollout, number) for number in range(4)]
    assert sorted(map(str, conversations.answered_ids)) == sorted(map(str, expected))
    # A group begins while there is room for one rollout; later turns, up to the same number, wait in their engine.
    assert most_turns <= max(2 * at_a_time, at_a_time + size - 1) + (size - 1 if together else 0)
    assert [engine.load for engine in stage.dispatcher.engines()] == [0] * engines
    for request in requests:
        homes = {conversations.engine_names[RequestId(request.id.rollout, number)] for number in range(4)}
        assert len(homes) == 1 or str(request.id.rollout) in moved


def test_later_turns_go_to_their_engine_at_once_up_to_as_many_as_it_decodes_and_then_before_new_groups() -> None:
    stage = Stage(2, at_a_time=1)
    stage.submit([*turns(0, 2, [1], 1), turn(1, longest=2), turn(2, longest=9), turn(3, longest=1)], turns_follow=True)
    for _ in range(2):
        stage.step_engines()
    assert [request.id.rollout.group for request, _ in stage.answers] == [0, 0, 1]
    # Engine 0 went on with another group, engine 1 is about to be free.
    assert (stage.list_sampling(0), stage.list_sampling(1)) == ([(2, 0)], [(3, 0)])
    later_turns = [make_next_turn(request) for request, _ in stage.answers[:2]]
    stage.submit([turn(4, longest=1), *later_turns], turns_follow=True)
    # One more than it decodes waits in engine 0, the other in the dispatcher; engine 1 takes the new group.
    assert stage.list_sampling(0) == [(2, 0), (0, 0)]
    for _ in range(14):
        stage.step_engines()
    order = [request.id for request, _ in stage.answers[3:]]
    assert order.index(later_turns[0].id) < order.index(later_turns[1].id) and len(order) == 5


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
    stage.step_engines()
    # Two wait for their environment. One is sampled, so another begins, beyond what the cache holds.
    assert [request.id.rollout.group for request, _ in stage.answers] == [0, 1]
    assert [group for group, _ in stage.list_sampling(0)] == [2, 3]
    stage.finish([request.id.rollout for request, _ in stage.answers])
    assert [group for group, _ in stage.list_sampling(0)] == [2, 3, 4]


def test_nobody_remembers_the_engine_of_a_rollout_that_is_over() -> None:
    stage = Stage(1, at_a_time=4)
    stage.submit(turns(0, 3, [1], 2), turns_follow=True)
    for _ in range(4):
        stage.step_engines()
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
        stage.submit([make_next_turn(turn(group, longest=9))], turns_follow=True)

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
