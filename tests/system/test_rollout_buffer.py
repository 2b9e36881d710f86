"""The rollout buffer on a real engine, step by step: drained, resampled, stopped, killed; every task ends once and in
time."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from rlctl.config.schema import GrpoConfig
from rlctl.data.cursor import Cursor, TaskSource
from rlctl.data.tasks import Task
from rlctl.generation.engine import Engine, FinishedTurns
from rlctl.generation.generator_pool import GeneratorPool
from rlctl.generation.requests import RequestId, TurnRequest
from rlctl.generation.spec import ForcedLengths
from rlctl.preflight.load import load
from rlctl.refit.refit import Refit
from rlctl.rewards.scorer import Score
from rlctl.rollout.buffer import RolloutBuffer
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.players.single_turn import SingleTurnPlayer
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import Rollout, RolloutGroup
from rlctl.workers.group import WorkerGroup, WorkerSpec
from tests.system.drifting import DriftingSource
from tests.system.engines import SEAT, MakeSource, refit_options, spec_for
from tests.tiny_models import make_model
from tests.turns import turns
from tests.waiting import PATIENCE_S, until

DEADLINE = 600.0
PROMPTS = 4
SAMPLES = 2


@dataclass
class Stage:
    """One engine, some of whose answers are very long, and a source of weights that change with every version."""

    pool: GeneratorPool
    events: list[dict[str, Any]]
    steps: list[list[RolloutGroup]] = field(default_factory=list)
    buffer: RolloutBuffer | None = None
    dispatcher: RolloutDispatcher | None = None
    # True to take the groups of a step as soon as each is complete.
    takes_parts: bool = False
    # Groups that were taken before the last of their step.
    num_taken_early: int = 0

    def start(self, deadline_s: float, *settings: str) -> RolloutBuffer:
        """Begin a new run, after the run of the case before has ended."""
        common_settings = (
            "grpo.num_steps=8",
            f"grpo.num_prompts_per_step={PROMPTS}",
            f"grpo.num_generations_per_prompt={SAMPLES}",
            "async.enabled=true",
            f"run.deadline_s={deadline_s}",
        )
        config = load("grpo", None, [*common_settings, *settings]).config
        assert isinstance(config, GrpoConfig)
        config = replace(config, generation=replace(config.generation, max_new_tokens=1500))
        tasks = [Task(f"r{row}", [5 + row, 9, 12], "", None) for row in range(100)]
        source = TaskSource(tasks, Cursor(len(tasks), 0, False))
        self.pool.sync(0)
        self.steps = []
        # The pool's callback appends to this list.
        self.events.clear()
        self.takes_parts = False
        self.num_taken_early = 0
        self.dispatcher = RolloutDispatcher(self.pool, config.run, self._emit)
        runner = RolloutRunner(SingleTurnPlayer(), self.dispatcher)
        self.buffer = RolloutBuffer(config, source, self.dispatcher, runner, score, self._emit)
        return self.buffer

    def step(self, drained: bool = False) -> None:
        """Make one step like the training loop, but without training."""
        assert self.buffer
        buffer = self.buffer
        version = len(self.steps)
        buffer.admit(version)
        groups: list[RolloutGroup] = []
        while self.takes_parts and (part := buffer.take_part(version, 1, lambda _: nullcontext())):
            groups += part
        self.num_taken_early += len(groups)
        self.steps.append(groups + buffer.take(version, lambda _: nullcontext()))
        if drained:
            buffer.drain(lambda _: nullcontext())
        self.pool.sync(version + 1)
        buffer.advance(version + 1)

    def ages(self) -> list[int]:
        """Return the age of every trained group."""
        ages = []
        for version, groups in enumerate(self.steps):
            for group in groups:
                if group.rollouts:
                    oldest = min(int(rollout.sampled_versions.min()) for rollout in group.rollouts)
                    ages.append(version - oldest)
        return ages

    def rollouts(self) -> list[Rollout]:
        """Return the rollouts of all trained groups."""
        groups = chain.from_iterable(self.steps)
        return list(chain.from_iterable(group.rollouts for group in groups))

    def task_ids(self) -> list[str]:
        """Return the task ids of all trained groups, in order of the steps."""
        return [group.task.id for group in chain.from_iterable(self.steps)]

    def end(self) -> None:
        """Wait until the engine is idle, so that no answer of this run reaches the next run."""
        assert self.buffer and self.dispatcher
        until(self.dispatcher.drain)
        # This ends an engine that is slow to answer; the next case needs a fast one.
        with patch("rlctl.rollout.dispatcher._CLOSE_S", PATIENCE_S):
            self.buffer.close()

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def _emit(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})


def score(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    scored_groups = []
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            reward = float(rollout.num_sampled % 2)
            rollouts.append(replace(rollout, score=Score(reward, {}, None, True)))
        scored_groups.append(replace(group, rollouts=rollouts))
    return scored_groups


@pytest.fixture(scope="module")
def stage(ray_here: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("feed")
    folder = make_model(root / "model", seed=1, max_length=2048)
    spec = replace(spec_for(folder, 2048), max_num_seqs=16, forced_lengths=ForcedLengths(40, 1.6))
    events: list[dict[str, Any]] = []

    def emit(kind: str, **fields: Any) -> None:
        events.append({"kind": kind, **fields})

    source = WorkerGroup([WorkerSpec("source", MakeSource(folder, DriftingSource))], DEADLINE)
    pool = GeneratorPool(spec, [SEAT], str(ray_here), DEADLINE, 9, emit)
    try:
        source.built().wait(DEADLINE)
        pool.wait_until_built()
        pool.connect(Refit(source, refit_options("shm", root / "shm", in_flight=True)))
        yield Stage(pool, events)
    finally:
        pool.kill()
        source.kill()


def test_rollouts_that_ended_are_handed_out_before_their_group_is_done(stage: Stage) -> None:
    engine = stage.pool.engines[0]
    requests = turns(0, 12, [5, 9, 12], 1500, 3)
    stage.pool.sync(0)
    collecting = engine.start(Engine.collect, DEADLINE)
    engine.start(Engine.submit, requests).wait(DEADLINE)
    batches: list[FinishedTurns] = collecting.wait(DEADLINE)
    while sum(len(batch.ids) for batch in batches) < 12:
        batches += engine.start(Engine.collect, DEADLINE).wait(DEADLINE)
    assert len(batches) > 1 and all(batch.ids for batch in batches)
    finished_ids = set(chain.from_iterable(batch.ids for batch in batches))
    assert finished_ids == {request.id for request in requests}
    assert all(len(batch.columns.lengths) == len(batch.ids) for batch in batches)
    assert batches[-1].stats.tokens > batches[-1].stats.steps > 0


def test_drained_no_rollout_mixes_versions(stage: Stage) -> None:
    stage.start(DEADLINE, "async.in_flight_weight_updates=false")
    for _ in range(5):
        stage.step(drained=True)
    stage.end()
    assert all(len(np.unique(rollout.sampled_versions)) == 1 for rollout in stage.rollouts())
    assert max(stage.ages()) == 1
    assert len(set(stage.task_ids())) == 5 * PROMPTS


@pytest.mark.parametrize(
    "policy",
    [
        "windowed_fifo",
        pytest.param("in_order", marks=pytest.mark.long),
        pytest.param("ready_first", marks=pytest.mark.long),
    ],
)
def test_in_flight_every_policy_keeps_the_bound_and_every_prompt(stage: Stage, policy: str) -> None:
    stage.start(DEADLINE, f"async.policy={policy}", "async.max_trajectory_age_steps=2")
    stage.takes_parts = True
    for _ in range(8):
        stage.step()
    stage.end()
    assert stage.num_taken_early
    assert 0 < max(stage.ages()) <= 2
    drawn_ids = [f"e0-r{row}" for row in range(8 * PROMPTS)]
    assert sorted(stage.task_ids()) == sorted(drawn_ids)
    rollouts = stage.rollouts()
    assert any(len(np.unique(rollout.sampled_versions)) > 1 for rollout in rollouts)
    # No long group was left behind: the trained groups are the drawn ones.
    trained_lengths = [rollout.num_sampled for rollout in rollouts]
    assert stage.buffer and sorted(stage.buffer.sampled_lengths()) == sorted(trained_lengths)
    if policy == "in_order":
        assert stage.task_ids() == drawn_ids


def test_a_group_at_the_bound_is_drawn_anew_once_and_no_more(stage: Stage) -> None:
    stage.start(DEADLINE, "async.on_bound=requeue")
    for _ in range(8):
        stage.step()
    stage.end()
    redrawn = [event["prompt"] for event in stage.events_of("redrawn")]
    assert redrawn and len(set(redrawn)) == len(redrawn)
    assert max(stage.ages()) <= 1
    assert sorted(stage.task_ids()) == sorted(f"e0-r{row}" for row in range(8 * PROMPTS))


def test_an_engine_that_stands_still_is_replaced_and_one_that_keeps_dying_costs_its_prompts(stage: Stage) -> None:
    stage.start(6.0, "generation.max_generation_failures=0", "run.explain_after_s=2")
    engine_pid = stage.pool.engines[0].pid()
    stage.step()
    # The engine is stopped at once, while it samples for the next step.
    os.kill(engine_pid, signal.SIGSTOP)
    for _ in range(2):
        stage.step()
    stage.end()
    assert stage.events_of("engine_lost")
    warnings = [event["what"] for event in stage.events_of("warning")]
    waits = [warning for warning in warnings if "s without a new group: step 2 waits for" in warning]
    assert any("engine-0 samples" in warning for warning in waits)
    dropped_ids = [group.task.id for group in chain.from_iterable(stage.steps) if not group.rollouts]
    assert dropped_ids
    # Warnings about rollouts that began together come in their engine's order.
    drop_warnings = sorted(warning for warning in warnings if "dropped" in warning)
    assert drop_warnings == sorted(f"prompt {prompt} is dropped: its sampling failed 1 times" for prompt in dropped_ids)
    assert len(set(stage.task_ids())) == 3 * PROMPTS


def test_an_engine_that_hangs_keeps_no_other_from_its_work(ray_here: Path, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    spec = replace(spec_for(folder), max_num_seqs=4)
    pool = GeneratorPool(spec, [SEAT, SEAT], str(ray_here), DEADLINE, 0, lambda kind, **fields: None)
    try:
        pool.wait_until_built()
        config = load("grpo", None, [f"run.deadline_s={DEADLINE}"]).config
        dispatcher = RolloutDispatcher(pool, config.run, lambda *_, **__: None)
        hung_pid = pool.engines[0].pid()
        os.kill(hung_pid, signal.SIGSTOP)
        requests: list[TurnRequest] = []
        for group in range(20):
            requests += turns(group, 2, [5, 9, 12], 8, group)
        events = dispatcher.events

        def begin_turns(requests: list[TurnRequest]) -> dict[RequestId, Any]:
            return {request.id: events.spawn(dispatcher.sample_turn(request)) for request in requests}

        def answered_ids() -> set[RequestId]:
            return {request_id for request_id, task in turn_tasks.items() if task.done() and not task.cancelled()}

        turn_tasks = events.ask(lambda: begin_turns(requests))

        # The engine that hangs was given as many requests as it decodes at a time.
        until(lambda: len(answered_ids()) == 36)
        stuck = [request for request in requests if request.id not in answered_ids()]
        events.ask(lambda: [turn_tasks[request.id].cancel() for request in stuck])
        # A later turn would wait for the engine that hangs; a new attempt goes to the other.
        retries = []
        for request in stuck:
            retries.append(replace(request, id=RequestId(replace(request.id.rollout, attempt=1))))
        turn_tasks |= events.ask(lambda: begin_turns(retries))
        until(lambda: len(answered_ids()) == 40)
        assert not dispatcher.drain()
        os.kill(hung_pid, signal.SIGCONT)
        until(dispatcher.drain)
        answered_rollouts = {replace(request_id.rollout, attempt=0) for request_id in answered_ids()}
        assert answered_rollouts == {request.id.rollout for request in requests}
        dispatcher.close()
    finally:
        pool.kill()
