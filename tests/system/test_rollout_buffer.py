"""The rollout buffer on a real engine, step by step: drained, resampled, stopped, killed; every task ends once and in
time."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
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
from rlctl.rollout.types import RolloutGroup
from rlctl.workers.group import WorkerGroup, WorkerSpec
from tests.system.drifting import DriftingSource
from tests.system.engines import SEAT, MakeSource, refit_options, spec_for
from tests.tiny_models import make_model
from tests.turns import turns
from tests.waiting import PATIENCE_S, until

DEADLINE, PROMPTS, SAMPLES = 600.0, 4, 2


@dataclass
class Stage:
    """One engine with a long tail of answers, and a source of weights that change with every version."""

    pool: GeneratorPool
    events: list[dict[str, Any]]
    steps: list[list[RolloutGroup]] = field(default_factory=list)
    buffer: RolloutBuffer | None = None
    dispatcher: RolloutDispatcher | None = None
    # True to take a step's groups as they come; and the number taken before the last of their step.
    parts: bool = False
    taken_early: int = 0

    def start(self, deadline_s: float, *settings: str) -> RolloutBuffer:
        """Begin a new run for each case, once the last one is done."""
        size = (
            "grpo.num_steps=8",
            f"grpo.num_prompts_per_step={PROMPTS}",
            f"grpo.num_generations_per_prompt={SAMPLES}",
        )
        more = ("async.enabled=true", f"run.deadline_s={deadline_s}")
        config = load("grpo", None, [*size, *more, *settings]).config
        assert isinstance(config, GrpoConfig)
        config = replace(config, generation=replace(config.generation, max_new_tokens=1500))
        rows = [Task(f"r{i}", [5 + i, 9, 12], "", None) for i in range(100)]
        source = TaskSource(rows, Cursor(len(rows), 0, False))
        self.pool.sync(0)
        self.steps, self.events[:] = [], []
        self.parts, self.taken_early = False, 0
        self.dispatcher = RolloutDispatcher(self.pool, config.run, self._emit)
        runner = RolloutRunner(SingleTurnPlayer(), self.dispatcher)
        self.buffer = RolloutBuffer(config, source, self.dispatcher, runner, score, self._emit)
        return self.buffer

    def step(self, drained: bool = False) -> None:
        """As the loop does it; training is left out."""
        assert self.buffer
        buffer, version = self.buffer, len(self.steps)
        buffer.admit(version)
        groups: list[RolloutGroup] = []
        while self.parts and (part := buffer.take_part(version, 1, lambda _: nullcontext())):
            groups += part
        self.taken_early += len(groups)
        self.steps.append(groups + buffer.take(version, lambda _: nullcontext()))
        if drained:
            buffer.drain(lambda _: nullcontext())
        self.pool.sync(version + 1)
        buffer.advance(version + 1)

    def ages(self) -> list[int]:
        """Return the age of every trained group."""
        return [
            version - min(int(one.sampled_versions.min()) for one in group.rollouts)
            for version, groups in enumerate(self.steps)
            for group in groups
            if group.rollouts
        ]

    def end(self) -> None:
        """Wait until the engine is idle: no answer of this run may reach the next one."""
        assert self.buffer and self.dispatcher
        until(self.dispatcher.drain)
        # This ends an engine that is slow to answer; the next case needs a fast one.
        with patch("rlctl.rollout.dispatcher._CLOSE_S", PATIENCE_S):
            self.buffer.close()

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def _emit(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})


def score(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    return [
        replace(
            group,
            rollouts=[replace(one, score=Score(float(one.num_sampled % 2), {}, None, True)) for one in group.rollouts],
        )
        for group in groups
    ]


@pytest.fixture(scope="module")
def stage(ray_here: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("feed")
    folder = make_model(root / "model", seed=1, max_length=2048)
    spec = replace(spec_for(folder, 2048), max_num_seqs=16, forced_lengths=ForcedLengths(40, 1.6))
    events: list[dict[str, Any]] = []
    source = WorkerGroup([WorkerSpec("source", MakeSource(folder, DriftingSource))], DEADLINE)
    pool = GeneratorPool(
        spec,
        [SEAT],
        str(ray_here),
        DEADLINE,
        9,
        lambda kind, **f: events.append({"kind": kind, **f}),
    )
    try:
        source.built().wait(DEADLINE)
        pool.wait_until_built()
        pool.connect(Refit(source, refit_options("shm", root / "shm", in_flight=True)))
        yield Stage(pool, events)
    finally:
        pool.kill()
        source.kill()


def ids(steps: list[list[RolloutGroup]]) -> list[str]:
    return [group.task.id for groups in steps for group in groups]


def test_rollouts_that_ended_are_handed_out_before_their_group_is_done(stage: Stage) -> None:
    engine, requests = stage.pool.engines[0], turns(0, 12, [5, 9, 12], 1500, 3)
    stage.pool.sync(0)
    collecting = engine.start(Engine.collect, DEADLINE)
    engine.start(Engine.submit, requests).wait(DEADLINE)
    told: list[FinishedTurns] = collecting.wait(DEADLINE)
    while sum(len(each.ids) for each in told) < 12:
        told += engine.start(Engine.collect, DEADLINE).wait(DEADLINE)
    assert len(told) > 1 and all(each.ids for each in told)
    assert {one for each in told for one in each.ids} == {request.id for request in requests}
    assert all(len(each.columns.lengths) == len(each.ids) for each in told)
    assert told[-1].stats.tokens > told[-1].stats.steps > 0


def test_drained_no_rollout_mixes_versions(stage: Stage) -> None:
    stage.start(DEADLINE, "async.in_flight_weight_updates=false")
    for _ in range(5):
        stage.step(drained=True)
    stage.end()
    rollouts = [one for groups in stage.steps for group in groups for one in group.rollouts]
    assert all(len(np.unique(one.sampled_versions)) == 1 for one in rollouts)
    assert max(stage.ages()) == 1
    assert len(set(ids(stage.steps))) == 5 * PROMPTS


@pytest.mark.parametrize(
    "policy", ["windowed_fifo", *(pytest.param(name, marks=pytest.mark.long) for name in ("in_order", "ready_first"))]
)
def test_in_flight_every_policy_keeps_the_bound_and_every_prompt(stage: Stage, policy: str) -> None:
    stage.start(DEADLINE, f"async.policy={policy}", "async.max_trajectory_age_steps=2")
    stage.parts = True
    for _ in range(8):
        stage.step()
    stage.end()
    assert stage.taken_early
    assert 0 < max(stage.ages()) <= 2
    assert sorted(ids(stage.steps)) == sorted(f"e0-r{i}" for i in range(8 * PROMPTS))
    rollouts = [one for groups in stage.steps for group in groups for one in group.rollouts]
    assert any(len(np.unique(one.sampled_versions)) > 1 for one in rollouts)
    # No long group was left behind: the trained groups are the drawn ones.
    trained = [one.num_sampled for one in rollouts]
    assert stage.buffer and sorted(stage.buffer.sampled_lengths()) == sorted(trained)
    if policy == "in_order":
        assert ids(stage.steps) == [f"e0-r{i}" for i in range(8 * PROMPTS)]


def test_a_group_at_the_bound_is_drawn_anew_once_and_no_more(stage: Stage) -> None:
    stage.start(DEADLINE, "async.on_bound=requeue")
    for _ in range(8):
        stage.step()
    stage.end()
    redrawn = [event["prompt"] for event in stage.told("redrawn")]
    assert redrawn and len(set(redrawn)) == len(redrawn)
    assert max(stage.ages()) <= 1
    assert sorted(ids(stage.steps)) == sorted(f"e0-r{i}" for i in range(8 * PROMPTS))


def test_an_engine_that_stands_still_is_replaced_and_one_that_keeps_dying_costs_its_prompts(stage: Stage) -> None:
    stage.start(6.0, "generation.max_generation_failures=0", "run.explain_after_s=2")
    engine = stage.pool.engines[0].pid()
    stage.step()
    # At once: it samples for the next step.
    os.kill(engine, signal.SIGSTOP)
    for _ in range(2):
        stage.step()
    stage.end()
    assert stage.told("engine_lost")
    warnings = [event["what"] for event in stage.told("warning")]
    assert any("s without a new group: step 2 waits for" in what and "engine-0 samples" in what for what in warnings)
    dropped = [group.task.id for groups in stage.steps for group in groups if not group.rollouts]
    assert dropped
    # Rollouts that began together are told in their engine's order.
    told = sorted(what for what in warnings if "dropped" in what)
    assert told == sorted(f"prompt {prompt} is dropped: its sampling failed 1 times" for prompt in dropped)
    assert len(set(ids(stage.steps))) == 3 * PROMPTS


def test_an_engine_that_hangs_keeps_no_other_from_its_work(ray_here: Path, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    spec = replace(spec_for(folder), max_num_seqs=4)
    pool = GeneratorPool(spec, [SEAT, SEAT], str(ray_here), DEADLINE, 0, lambda kind, **fields: None)
    try:
        pool.wait_until_built()
        config = load("grpo", None, [f"run.deadline_s={DEADLINE}"]).config
        dispatcher = RolloutDispatcher(pool, config.run, lambda *_, **__: None)
        hung = pool.engines[0].pid()
        os.kill(hung, signal.SIGSTOP)
        requests = [request for group in range(20) for request in turns(group, 2, [5, 9, 12], 8, group)]
        events = dispatcher.events

        def begin(requests: list[TurnRequest]) -> dict[RequestId, Any]:
            return {each.id: events.spawn(dispatcher.sample_turn(each)) for each in requests}

        def answered() -> set[RequestId]:
            return {each for each, task in sampled.items() if task.done() and not task.cancelled()}

        sampled = events.ask(lambda: begin(requests))

        # It was given as many as it decodes at a time.
        until(lambda: len(answered()) == 36)
        again = [request for request in requests if request.id not in answered()]
        events.ask(lambda: [sampled[request.id].cancel() for request in again])
        # A later turn would wait for the engine that hangs.
        others = [replace(one, id=RequestId(replace(one.id.rollout, attempt=1))) for one in again]
        sampled |= events.ask(lambda: begin(others))
        until(lambda: len(answered()) == 40)
        assert not dispatcher.drain()
        os.kill(hung, signal.SIGCONT)
        until(dispatcher.drain)
        assert {replace(each.rollout, attempt=0) for each in answered()} == {each.id.rollout for each in requests}
        dispatcher.close()
    finally:
        pool.kill()
