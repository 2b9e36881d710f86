"""The driver's cost of an event does not grow with the number of engines, nor with that of rollouts.

An event is the answer of one rollout, on virtual time: it is collected, its rollout ends, its group is counted and
scored, and the engine begins others. Buffer, runner and dispatcher are a run's own; engines only answer. Ray's part of
a call is not in it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from rlctl.data.cursor import Cursor, TaskSource
from rlctl.data.tasks import Task
from rlctl.generation.engine import Engine, EngineStats, FinishedTurns
from rlctl.generation.generator_pool import GeneratorPool
from rlctl.generation.requests import Completion, PackedCompletions, RequestId
from rlctl.preflight.load import load
from rlctl.rollout.buffer import RolloutBuffer
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.players.single_turn import SingleTurnPlayer
from rlctl.rollout.runner import RolloutRunner
from tests.virtual_events import VirtualEvents

GROUP = 8
AGE = 7
# Steps that walk over engines in another order than theirs.
STRIDE = 7919
ZEROS = np.zeros(4, np.int32)
ANSWER = PackedCompletions.pack([Completion(ZEROS, np.zeros(4, np.float32), ZEROS, "stop")])


@dataclass(frozen=True)
class EventRow:
    """Cost of an event with a number of engines."""

    engines: int
    # Rollouts that engines sample.
    in_flight: int
    # CPU seconds of an event, and of the admission of all rollouts.
    event: float
    admission: float


@dataclass(eq=False)
class AnsweringWorker:
    """`Worker` whose engine answers its oldest turn at each set of `may_answer`."""

    name: str
    request_ids: deque[RequestId] = field(default_factory=deque)
    # Lets the worker answer.
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    answers: int = 0

    async def call(self, deadline_s: float, method: Callable[..., Any], *arguments: Any) -> Any:
        if method is Engine.submit:
            self.request_ids.extend(request.id for request in arguments[0])
            return None
        await self.may_answer.wait()
        self.may_answer.clear()
        self.answers += 1
        return FinishedTurns([self.request_ids.popleft()], ANSWER, EngineStats(steps=self.answers))


@dataclass
class AnsweringPool:
    """`GeneratorPool`, as far as the dispatcher uses it, of engines that are never lost."""

    slots: list[AnsweringWorker]
    # Rollouts that an engine decodes at a time.
    at_a_time: int
    version: int = field(default=0, init=False)

    @property
    def engines(self) -> list[AnsweringWorker]:
        return self.slots

    def forget_gone(self) -> None:
        """Do nothing: none is gone."""

    def require_awake(self) -> None:
        """Do nothing: engines never sleep."""


def measure_events(engines: Sequence[int], in_flight: int, events: int) -> list[EventRow]:
    """Measure the cost of an event with each number of engines. events: number measured."""
    return [measure_event(number, in_flight, events) for number in engines]


def measure_event(engines: int, in_flight: int, events: int) -> EventRow:
    workers = [AnsweringWorker(f"engine-{index}") for index in range(engines)]
    at_a_time = max(1, in_flight // engines)
    # More groups than engines take at a time, so that some wait: by a group an engine, and those of the events.
    prompts = (in_flight // GROUP + engines + events) // (AGE + 1) + 1
    overrides = [
        f"grpo.num_prompts_per_step={prompts}",
        f"grpo.num_generations_per_prompt={GROUP}",
        "async.enabled=true",
        f"async.max_trajectory_age_steps={AGE}",
        "async.prefetch=full",
        "generation.max_new_tokens=4",
    ]
    config = load("grpo", None, overrides).settled.config
    loop = VirtualEvents()
    pool = AnsweringPool(workers, at_a_time)
    dispatcher = RolloutDispatcher(cast(GeneratorPool, pool), config.run, say_nothing, loop)
    source = TaskSource([Task("r0", [0] * 8, "", None)], Cursor(1, 0, False))
    runner = RolloutRunner(SingleTurnPlayer(), dispatcher)
    buffer = RolloutBuffer(config, source, dispatcher, runner, list, say_nothing)
    began = time.process_time()
    buffer.admit(0)
    loop.let_pass(0.0)
    admission = time.process_time() - began
    num_sampling = sum(len(worker.request_ids) for worker in workers)
    began = time.process_time()
    for number in range(events):
        workers[number * STRIDE % engines].may_answer.set()
        loop.let_pass(0.0)
    event = (time.process_time() - began) / events
    return EventRow(engines=engines, in_flight=num_sampling, event=event, admission=admission)


def say_nothing(kind: str, **fields: Any) -> None:
    pass


@pytest.mark.parametrize("in_flight", [1_000, 8_000])
def test_an_event_costs_the_same_with_8_engines_and_with_256(in_flight: int) -> None:
    few, many = measure_events([8, 256], in_flight, 2_000)
    assert few.in_flight >= in_flight * 0.9 and many.in_flight >= in_flight * 0.7
    # Measured: 0.03 ms. A sum over all turns in flight, or a look at each engine, would add 0.1 ms and more.
    assert many.event < 2.5 * few.event + 5e-5
    assert max(few.event, many.event) < 1e-3
