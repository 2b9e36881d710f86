"""Contracts 1, 2, 3 and 8 of buffer, dispatcher and pool under random schedules, each reproducible by its seed.

`Schedule` is a whole run, and checks every contract after each event. A second set of tests takes one rule away at a
time: the schedules notice.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rlctl.generation.generator_pool import GeneratorPool
from rlctl.generation.requests import Completion, TurnRequest
from rlctl.generation.vllm import active_requests, engine
from rlctl.rollout.buffer import RolloutBuffer
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.engine_queue import EngineQueue, SubmittedTurn
from rlctl.rollout.groups import GroupRecord, GroupState, GroupTable
from rlctl.rollout.players import running_call
from rlctl.rollout.runner import RolloutRunner, RunningRollout
from rlctl.rollout.staleness import StalenessRule
from rlctl.rollout.types import Waste
from rlctl.rollout.wait_deadline import TICK_S, WaitDeadline
from tests.unit.rollout.drawn_run import ContractBroken
from tests.unit.rollout.schedule import run_all

# 10,000 schedules. The first 600 are in every run of the suite: with `OFTEN_NOTICE` they notice every missing rule.
PER_CHUNK = 200
CHUNKS = 50
SHORT = 3
# Schedules that catch rare mutations. They come first, to save time alone.
OFTEN_NOTICE = (48, 51, 57, 64, 70, 75, 91, 205, 616, 683)


LONG_CHUNKS = [pytest.param(chunk, marks=pytest.mark.long) for chunk in range(SHORT, CHUNKS)]


@pytest.mark.parametrize("chunk", [*range(SHORT), *LONG_CHUNKS])
def test_every_schedule_keeps_every_contract(chunk: int) -> None:
    run_all(range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK))


# One rule taken away at a time.


async def forget_restarts(self: RolloutDispatcher) -> None:
    for queue in self._queues:
        if not self._is_current(queue):
            queue.give_up()
    await adopt_replaced(self)


async def tell_nobody(self: RolloutBuffer, rollouts: Any) -> None:
    pass


async def never_confirm(self: EngineQueue, turn: SubmittedTurn) -> None:
    await abort_turn(self, turn)
    if turn.stopped:
        await asyncio.get_running_loop().create_future()


def keep_the_load(self: EngineQueue, turn: SubmittedTurn) -> None:
    load_before = self.load
    remove_turn(self, turn)
    self.load = load_before


def forget_sampling(self: GroupTable, *arguments: Any) -> list[GroupRecord]:
    for group in load_state_dict(self, *arguments):
        self._remove_group(group.number)
    return []


def take_twice(self: GroupTable, numbers: list[int], version: int) -> list[GroupRecord]:
    return [self[number] for number in numbers]


def release_nothing(self: GroupTable) -> list[int]:
    for group in self.in_state(GroupState.TAKEN):
        self._remove_group(group.number)
        group.state = GroupState.READY
        self._add_group(group)
    return []


def repair_beside_the_trainer(self: RolloutBuffer, span: Any) -> None:
    self._dispatcher.repair()
    drain_buffer(self, span)


def deadline_alone(self: WaitDeadline, last_step: float, explain: Callable[[], str]) -> None:
    if self._now() - max(self._last_progress, last_step) >= self._run.deadline_s + TICK_S:
        raise RuntimeError(f"nothing was sampled or scored for 12 s (run.deadline_s): {explain()}")


def forget_surplus(self: GroupTable, groups: list[GroupRecord]) -> None:
    for group in groups:
        self._remove_group(group.number)


def fill_every_place(self: GroupTable, number: int, uselessness: str | None) -> None:
    self._move(self[number], GroupState.READY)


def select_first_to_end(self: GroupTable) -> list[int]:
    ready = sorted(self.in_state(GroupState.READY), key=lambda group: group.finished)
    return [group.number for group in ready][: self.num_lacking]


def replace_none(self: RolloutBuffer, *arguments: Any) -> bool:
    note_scores(self, *arguments)
    return False


async def swallow_a_cancellation(self: RunningRollout, request: TurnRequest) -> Completion:
    try:
        return await sample_turn(self, request)
    except asyncio.CancelledError:
        return await sample_turn(self, request)


async def forget_tasks(tasks: Any) -> None:
    pass


async def forget_to_cancel(self: RolloutRunner, ids: Any, seconds: float = 0.0) -> Any:
    stopped = [self._running.pop(rollout_id) for rollout_id in ids if rollout_id in self._running]
    return [rollout.start.id for rollout in stopped]


def block_the_loop(self: RolloutDispatcher) -> None:
    place_new_turns(self)
    events: Any = self.events
    events.time += 1.0


def wait_on_the_loop(self: RolloutDispatcher) -> None:
    place_new_turns(self)
    self.events.run(asyncio.sleep(1.0))


def do_nothing(*arguments: Any) -> None:
    pass


# The product's own functions, which a mutation replaces.
adopt_replaced = RolloutDispatcher._adopt_replaced
place_new_turns = RolloutDispatcher._place_new_turns
load_state_dict = GroupTable.load_state_dict
drain_buffer = RolloutBuffer.drain
note_scores = RolloutBuffer._note_scores
sample_turn = RunningRollout.sample
abort_turn = EngineQueue.abort
remove_turn = EngineQueue._remove_turn
MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "1 the rule keeps no deadline": (StalenessRule, "_find_latest_deadline", do_nothing),
    "1 the bound is a step wider": (StalenessRule, "deadline", lambda self, group: group.version + self.max_age + 1),
    "1 more is admitted than trains in time": (StalenessRule, "capacity", property(lambda self: 99)),  # type: ignore[dict-item]
    "2 requests of a lost engine are forgotten": (RolloutDispatcher, "_adopt_replaced", forget_restarts),
    "2 a resume forgets what was being sampled": (GroupTable, "load_state_dict", forget_sampling),
    "2 groups that are taken may be taken again": (GroupTable, "take", take_twice),
    "2 groups that were trained stay": (GroupTable, "release", release_nothing),
    "2 surplus groups are forgotten": (GroupTable, "put_off", forget_surplus),
    "2 surplus groups go on": (RolloutBuffer, "_put_off_surplus", lambda self: []),
    "2 groups that teach nothing are not told": (RolloutBuffer, "waste", lambda self: Waste()),
    "2 groups that teach nothing fill the step": (GroupTable, "mark_scored", fill_every_place),
    "2 whoever ends first trains": (GroupTable, "_select_first_drawn", select_first_to_end),
    "3 a torn engine goes on": (engine.VllmEngine, "_poison", do_nothing),
    "3 an engine that missed a version is kept": (GeneratorPool, "_rebuild", lambda *arguments: []),
    "3 engines are rebuilt beside the optimizer": (RolloutBuffer, "drain", repair_beside_the_trainer),
    "3 nobody notes when weights changed": (active_requests.ActiveRequests, "change", do_nothing),
    "8 a wait has no deadline": (WaitDeadline, "check", do_nothing),
    "8 a long wait is not explained": (WaitDeadline, "check", deadline_alone),
    "8 no group is sampled in place of another": (RolloutBuffer, "_note_scores", replace_none),
    "8 a cancellation is swallowed": (RunningRollout, "sample", swallow_a_cancellation),
    "2 rollouts that were stopped go on": (RolloutRunner, "stop", forget_to_cancel),
    "2 the loss of an engine is not told": (RolloutBuffer, "_restart_groups", tell_nobody),
    "2 the load of an engine is not given back": (EngineQueue, "_remove_turn", keep_the_load),
    "2 a cancelled turn never ends": (EngineQueue, "abort", never_confirm),
    "2 tasks of a rollout are leaked": (running_call, "_wait_until_ended", forget_tasks),
    "8 the event loop is blocked": (RolloutDispatcher, "_place_new_turns", block_the_loop),
    "8 the event loop waits for itself": (RolloutDispatcher, "_place_new_turns", wait_on_the_loop),
    "8 an engine that does nothing is trusted": (RolloutDispatcher, "_lose_silent", do_nothing),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_rule_that_is_taken_away_is_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[name])
    with pytest.raises((ContractBroken, RuntimeError, AssertionError)):
        run_all([*OFTEN_NOTICE, *range(SHORT * PER_CHUNK)])
