"""A failed refit is found in time, names the faulty part, and never leaves old and new weights mixed."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest

from rlctl.generation.engine import Engine
from rlctl.generation.generator_pool import GeneratorPool
from rlctl.generation.requests import PackedCompletions
from rlctl.refit.protocol import Kind
from rlctl.refit.refit import EnginesLost, Refit
from rlctl.refit.refit_plan import RefitPlan
from rlctl.workers.errors import WorkerError, WorkerTimeout
from rlctl.workers.group import Worker, WorkerGroup, WorkerSpec
from tests.faults.runs import survivors
from tests.system.engines import SEAT, FolderSource, MakeSource, greedy, refit_options, sample, spec_for
from tests.tiny_models import make_model
from tests.waiting import PATIENCE_S

DEADLINE = 600.0
# Seconds of deadline for refits that hang on purpose. Other refits may take longer.
TIMEOUT = 12.0
SHORTER = 8.0
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


@dataclass
class Stage:
    """Two engines with old weights, and a stand-in for a trainer that sends new weights."""

    pool: GeneratorPool
    source: WorkerGroup
    folder: Path
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def refit(self, kind: Kind, timeout_s: float = DEADLINE) -> Refit:
        refit = Refit(self.source, refit_options(kind, self.folder / "refit", timeout_s=timeout_s))
        self.pool.connect(refit)
        return refit

    def sample(self, engine: int) -> PackedCompletions:
        return sample(self.pool.engines[engine], greedy(PROMPTS, 12))


@pytest.fixture
def stage(ray_here: Path, tmp_path: Path) -> Iterator[Stage]:
    old = make_model(tmp_path / "old", seed=1)
    new = make_model(tmp_path / "new", seed=2)
    events: list[tuple[str, dict[str, Any]]] = []
    emit: Callable[..., None] = lambda kind, **fields: events.append((kind, fields))  # noqa: E731
    # The loading of vLLM: tests/system/test_refit.py.
    spec = replace(spec_for(old), kind="tests.plugins.torch_engine:KIND", options={})
    pool = GeneratorPool(spec, [SEAT, SEAT], str(ray_here), DEADLINE, 2, emit)
    source = WorkerGroup([WorkerSpec("trainer-0", MakeSource(new, FolderSource), threads=2)], DEADLINE)
    try:
        source.built().wait(DEADLINE)
        pool.wait_until_built()
        yield Stage(pool, source, tmp_path, events)
    finally:
        source.kill()
        pool.kill()


def are_equal(first: PackedCompletions, second: PackedCompletions) -> bool:
    return np.array_equal(first.tokens, second.tokens) and np.array_equal(first.log_probs, second.log_probs)


def test_whatever_goes_wrong_is_named_in_time_and_no_engine_serves_a_mixture(stage: Stage) -> None:
    before = stage.sample(1)
    check_an_engine_of_another_plan(stage, before)
    before = stage.sample(0)
    check_a_trainer_that_stands_still(stage)
    assert are_equal(stage.sample(0), before)
    check_an_engine_killed_on_the_way(stage)
    check_a_trainer_that_cannot_open(stage)


def check_an_engine_of_another_plan(stage: Stage, before: PackedCompletions) -> None:
    """Check that an engine with another plan keeps serving its old weights, and takes part in the next refit."""
    refit = stage.refit("shm")
    plan = refit.plan
    other_plan = RefitPlan.build([(entry.name, entry.shape, entry.dtype) for entry in reversed(plan.entries)])
    stage.pool.engines[1].start(Engine.refit_open, refit.transport(2), other_plan, 2, "auto", False).wait(DEADLINE)
    with pytest.raises(EnginesLost, match=f"the trainer sends by plan {plan.digest}, this end was given plan") as lost:
        refit.run(stage.pool.ends(), 1)
    assert [*lost.value.reasons] == lost.value.intact == [1]
    assert are_equal(stage.sample(1), before)
    stage.pool.connect(refit)
    stage.pool.sync(2)
    assert are_equal(stage.sample(0), stage.sample(1))
    assert not are_equal(stage.sample(1), before)
    assert set(stage.sample(1).versions.tolist()) == {2}


def check_a_trainer_that_stands_still(stage: Stage) -> None:
    """Check that a stopped trainer is named before the deadline."""
    stage.refit("broadcast", SHORTER)
    trainer = stage.source.workers[0].pid()
    os.kill(trainer, signal.SIGSTOP)
    begin = time.monotonic()
    try:
        with pytest.raises(WorkerTimeout, match=r"waited \d+ s for trainer-0 to finish refit_send"):
            stage.pool.sync(3)
    finally:
        os.kill(trainer, signal.SIGCONT)
    assert SHORTER <= time.monotonic() - begin < PATIENCE_S


def check_an_engine_killed_on_the_way(stage: Stage) -> None:
    """Check that an engine killed during a refit is rebuilt with the new version."""
    # The other engine learns this by gloo's own timeout.
    stage.refit("broadcast", TIMEOUT)
    trainer = stage.source.workers[0].pid()
    engine = psutil.Process(stage.pool.engines[0].pid())
    # While the trainer stands still both engines wait in the middle of the refit.
    os.kill(trainer, signal.SIGSTOP)

    start = stage.pool.engines[0].start
    refit_has_begun = threading.Event()

    def start_and_notice(method: Any, *arguments: Any) -> Any:
        pending = start(method, *arguments)
        if method.__name__ == "refit_receive":
            refit_has_begun.set()
        return pending

    def kill() -> None:
        if refit_has_begun.wait(PATIENCE_S):
            # By now it receives, or is about to.
            time.sleep(1)
            engine.kill()
            survivors([engine])
        os.kill(trainer, signal.SIGCONT)

    killer = threading.Thread(target=kill)
    killer.start()
    with patch.object(stage.pool.engines[0], "start", start_and_notice):
        stage.pool.sync(5)
    killer.join()
    losses = [fields for kind, fields in stage.events if kind == "engine_lost"]
    assert [loss["engine"] for loss in losses] == [0]
    assert "engine-0 died during refit_receive" in losses[0]["reason"]
    first = stage.sample(0)
    second = stage.sample(1)
    assert are_equal(first, second)
    assert set(first.versions.tolist()) == set(second.versions.tolist()) == {5}


def check_a_trainer_that_cannot_open(stage: Stage) -> None:
    """Check that the trainer's error is shown in time, though engines wait for the trainer."""
    begin = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as busy, patch.object(Worker, "meeting_point") as meeting_point:
        meeting_point.return_value = busy.getsockname()
        with pytest.raises(WorkerError, match=r"trainer-0.*nobody could be met at 127\.0\.0\.1"):
            stage.refit("broadcast", PATIENCE_S)
    # The engines wait for the trainer that long.
    assert time.monotonic() - begin < PATIENCE_S
