"""If an engine dies in a refit by broadcast, only this engine restarts. Others do not wait until a deadline."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import rlctl.refit.refit
from rlctl.generation.engine import Engine
from rlctl.generation.generator_pool import EngineSlot, GeneratorPool
from rlctl.refit.refit import Refit
from rlctl.refit.sender import SendsWeights
from rlctl.refit.weight_source import Shard
from rlctl.workers.group import Worker, WorkerGroup, WorkerSpec
from tests.faults.runs import survivors
from tests.plugins.plain_engine import PlainEngine, environment, hash_of
from tests.system.engines import SEAT, FolderSource, MakeSource, greedy, refit_options, sample, spec_for
from tests.tiny_models import make_model
from tests.waiting import PATIENCE_S, until

ENGINE = Path(__file__).parents[1] / "plugins" / "plain_engine.py"
# A deadline in seconds that an engine reaches only if it is not told of a lost peer.
FAR_S = 10 * PATIENCE_S
VICTIM = 1
Events = list[tuple[str, dict[str, Any]]]


class Rows(SendsWeights):
    """Stand-in for a trainer rank with its rows of four tensors of 8 MiB, which is more than sockets can buffer."""

    def __init__(self, rank: int, world: int) -> None:
        import torch

        size = ROWS // world
        self.first = rank * size
        self.rows = {name: tensor[self.first : self.first + size] for name, tensor in make_tensors().items()}
        super().__init__(self, rank, torch.device("cpu"))

    def layout(self, dtype: str | None = None) -> list[tuple[str, tuple[int, ...], str]]:
        return [(name, (ROWS, COLUMNS), "float32") for name in self.rows]

    def shards(self) -> list[Shard]:
        return [Shard(name, (self.first, 0), rows) for name, rows in self.rows.items()]


ROWS = 4096
COLUMNS = 512


def make_tensors() -> dict[str, Any]:
    import torch

    torch.manual_seed(3)
    return {name: torch.randn(ROWS, COLUMNS) for name in "abcd"}


class MakeRows:
    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    def __call__(self) -> Rows:
        return Rows(self.rank, self.world)


@contextmanager
def stage(
    folder: Path,
    logs: Path,
    spec: Any,
    seat: EngineSlot,
    engines: int,
    trainers: list[Callable[[], Any]],
    **options: Any,
) -> Iterator[tuple[GeneratorPool, WorkerGroup, Events]]:
    """Start engines that may be restarted once, and join them with trainer ranks by broadcast."""
    events: Events = []

    def emit(kind: str, **fields: Any) -> None:
        events.append((kind, fields))

    pool = GeneratorPool(spec, [seat] * engines, str(logs), FAR_S, 1, emit)
    ranks = [WorkerSpec(f"trainer-{rank}", make_trainer, threads=2) for rank, make_trainer in enumerate(trainers)]
    source = WorkerGroup(ranks, FAR_S)
    try:
        source.built().wait(FAR_S)
        pool.wait_until_built()
        pool.connect(Refit(source, refit_options("broadcast", folder, timeout_s=FAR_S, **options)))
        yield pool, source, events
    finally:
        source.kill()
        pool.kill()


def check_one_loss(pool: GeneratorPool, before: list[Worker | None], events: Events) -> None:
    """Check that one engine is new and was counted. Every other engine is still the same process."""
    engine_events = [(kind, fields["engine"]) for kind, fields in events if kind.startswith("engine_")]
    assert engine_events == [("engine_lost", VICTIM), ("engine_restarted", VICTIM)]
    assert [index for index, worker in enumerate(pool.slots) if worker is not before[index]] == [VICTIM]


@pytest.mark.parametrize("engines", [3, pytest.param(8, marks=[pytest.mark.long])])
def test_a_direct_refit_survives_an_engine_killed_in_the_middle(
    ray_here: Path, tmp_path: Path, engines: int, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(rlctl.refit.refit, "_LEAST_BUFFER_BYTES", 1 << 20)
    spec = replace(spec_for(tmp_path), kind=f"{ENGINE}:KIND")
    # Two owners share each group.
    trainers: list[Callable[[], Any]] = [MakeRows(rank, 4) for rank in range(4)]
    with stage(tmp_path, ray_here, spec, EngineSlot(environment("cpu", [])), engines, trainers) as (pool, _, events):
        assert pool._refit and len(pool._refit.plan.owner_groups) == 2
        slots_before = list(pool.slots)
        pid = pool.engines[VICTIM].pid()
        (tmp_path / f"hold-{pid}").touch()

        def kill() -> None:
            until((tmp_path / f"held-{pid}").exists)
            # The others' sockets fill, and they wait too.
            time.sleep(1)
            process = psutil.Process(pid)
            process.kill()
            survivors([process])

        killer = threading.Thread(target=kill)
        killer.start()
        begin = time.monotonic()
        report = pool.sync(1)
        killer.join()
        assert report.rebuilt == (VICTIM,)
        record_property("seconds", time.monotonic() - begin)
        check_one_loss(pool, slots_before, events)
        hashes = {name: hash_of(tensor) for name, tensor in make_tensors().items()}
        calls = [engine.start(PlainEngine.live) for engine in pool.engines]
        assert [call.wait(PATIENCE_S)[0] for call in calls] == [{"state": "whole"} | hashes] * engines
        # All engines are in one process group again.
        assert pool.sync(2).rebuilt == ()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_eight_engines_that_stage_by_broadcast_sample_on_while_a_killed_one_is_rebuilt(
    ray_here: Path, tmp_path: Path, record_property: Any
) -> None:
    old = make_model(tmp_path / "old", seed=1)
    new = make_model(tmp_path / "new", seed=2)
    trainers: list[Callable[[], Any]] = [MakeSource(new, FolderSource)]
    with stage(tmp_path, ray_here, spec_for(old), SEAT, 8, trainers, in_flight=True) as (pool, source, events):
        slots_before = list(pool.slots)
        victim = psutil.Process(pool.engines[VICTIM].pid())
        trainer = psutil.Process(source.workers[0].pid())
        start = Worker.start
        receives = threading.Semaphore(0)

        def start_and_count(worker: Worker, method: Any, *arguments: Any) -> Any:
            pending = start(worker, method, *arguments)
            if method.__name__ == Engine.refit_receive.__name__:
                receives.release()
            return pending

        def kill() -> None:
            for _ in range(8):
                receives.acquire(timeout=PATIENCE_S)
            time.sleep(1)
            victim.kill()
            survivors([victim])
            trainer.resume()

        # While it stands still all engines wait in the middle of the refit.
        trainer.suspend()
        killer = threading.Thread(target=kill)
        killer.start()
        begin = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Worker, "start", start_and_count)
            pool.sync(1)
        killer.join()
        record_property("seconds", time.monotonic() - begin)
        check_one_loss(pool, slots_before, events)
        answers = [sample(engine, greedy([[5, 6, 7, 8], [9, 10, 11]], 12)) for engine in pool.engines]
        assert all(set(answer.versions.tolist()) == {1} for answer in answers)
        assert all(answer.tokens.tolist() == answers[0].tokens.tolist() for answer in answers)
