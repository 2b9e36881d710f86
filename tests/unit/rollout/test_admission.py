"""Admission begins rollouts in slices, so that the event loop can run other callbacks. So do resume and validation."""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from rlctl.data.cursor import Cursor, TaskSource
from rlctl.data.tasks import Task
from rlctl.generation.engine import Engine, EngineStats, FinishedTurns
from rlctl.generation.requests import Completion, PackedCompletions, TurnRequest
from rlctl.preflight.load import load
from rlctl.rollout.buffer import RolloutBuffer
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.players.single_turn import SingleTurnPlayer
from rlctl.rollout.policy import Policy
from rlctl.rollout.runner import SLICE, RolloutRunner
from rlctl.rollout.types import Rollout, RolloutStart, Sampling
from rlctl.utils.event_loop import EventLoop
from tests.unit.rollout.test_event_cost import AnsweringPool, say_nothing
from tests.waiting import until

GROUP = 8
PROMPTS = 512
# CPU seconds in which the loop goes round; it takes 0.003 to 0.01 with slices, and 0.1 to 0.2 without.
BOUND_S = 0.05
ANSWER = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")


class EngineWorker:
    """Stand-in for an engine's worker that accepts requests. answers: True to answer each request a little later."""

    name = "engine-0"
    answers = False

    def __init__(self) -> None:
        self.requests = list[TurnRequest]()
        self._num_answered = 0

    async def call(self, deadline_s: float, method: Any, *arguments: Any) -> Any:
        if method is Engine.submit:
            self.requests.extend(arguments[0])
            return None
        await asyncio.sleep(0.05)
        if not self.answers:
            return FinishedTurns([], PackedCompletions.pack([]), EngineStats())
        ended = self.requests[self._num_answered :]
        self._num_answered = len(self.requests)
        columns = PackedCompletions.pack([ANSWER] * len(ended))
        return FinishedTurns([request.id for request in ended], columns, EngineStats(tokens=self._num_answered))


class CountingPlayer(SingleTurnPlayer):
    """Player that counts the rollouts that it begins."""

    num_begun = 0

    async def play(self, start: RolloutStart, policy: Policy) -> Rollout:
        self.num_begun += 1
        return await super().play(start, policy)


class Stage:
    """A buffer of synchronous steps of 4,096 rollouts, and a task that looks once in each round of the loop."""

    def __init__(self) -> None:
        sizes = [f"grpo.num_prompts_per_step={PROMPTS}", f"grpo.num_generations_per_prompt={GROUP}"]
        config = load("grpo", None, sizes).settled.config
        self.events = EventLoop("rollouts")
        self.worker = EngineWorker()
        self.player = CountingPlayer()
        pool = AnsweringPool(cast(Any, [self.worker]), 2 * GROUP * PROMPTS)
        self.dispatcher = RolloutDispatcher(cast(Any, pool), config.run, say_nothing, self.events)
        self.runner = RolloutRunner(self.player, self.dispatcher)
        source = TaskSource([Task("r0", [1, 2], "", None)], Cursor(1, 0, False))
        self.buffer = RolloutBuffer(config, source, self.dispatcher, self.runner, list, say_nothing)
        # Rollouts that began, and CPU seconds, in each round.
        self.rounds = list[tuple[int, float]]()
        self.events.ask(lambda: self.events.spawn(self._note_rounds()))

    async def _note_rounds(self) -> None:
        while True:
            begun_before = self.player.num_begun
            time_before = time.thread_time()
            await asyncio.sleep(0)
            self.rounds.append((self.player.num_begun - begun_before, time.thread_time() - time_before))

    def settle(self, rollouts: int) -> None:
        """Wait until the engine has got `rollouts` rollouts."""
        until(lambda: len(self.worker.requests) >= rollouts)

    def count_most_begun(self) -> int:
        """Return the largest number of rollouts that began in one round."""
        return max(num_begun for num_begun, _ in self.rounds)

    def was_never_held_up(self) -> bool:
        return self.count_most_begun() <= SLICE and max(seconds for _, seconds in self.rounds) < BOUND_S


@pytest.fixture
def stages() -> Iterator[Callable[[], Stage]]:
    """Return a function that makes stages.

    Python collects no garbage meanwhile: that takes time for all objects of the test process.
    """
    stages_made = list[Stage]()

    def make() -> Stage:
        stage = Stage()
        stages_made.append(stage)
        return stage

    gc.disable()
    yield make
    gc.enable()
    for stage in stages_made:
        stage.events.close()


def test_a_step_of_4096_rollouts_begins_in_slices_and_whole_groups(stages: Callable[[], Stage]) -> None:
    stage = stages()
    stage.buffer.admit(0)
    stage.settle(GROUP * PROMPTS)
    assert stage.was_never_held_up()
    ids = [request.id.rollout for request in stage.worker.requests]
    assert [(rollout_id.group, rollout_id.index) for rollout_id in ids] == list(product(range(PROMPTS), range(GROUP)))
    # Nothing else is admitted.
    assert stage.buffer.occupancy() == {0: PROMPTS}


def test_a_resume_begins_its_groups_in_slices(stages: Callable[[], Stage], tmp_path: Path) -> None:
    before = stages()
    before.buffer.admit(0)
    before.settle(GROUP * PROMPTS)
    state, write = before.buffer.snapshot()
    write(tmp_path)
    stage = stages()
    stage.buffer.load(state["groups"], tmp_path, 0)
    stage.settle(GROUP * PROMPTS)
    assert stage.was_never_held_up()


def test_a_validation_begins_its_groups_in_slices(stages: Callable[[], Stage]) -> None:
    stage = stages()
    tasks = [Task(f"v{number}", [1, 2], "", None) for number in range(PROMPTS)]
    stage.worker.answers = True
    groups = stage.dispatcher.sample(stage.runner, Sampling("validation", 0, PROMPTS, GROUP, 4, 1.0), tasks, 0)
    assert [len(group.rollouts) for group in groups] == [GROUP] * PROMPTS
    assert stage.count_most_begun() <= SLICE
