"""Imports of a run's workers on this machine. A server makes them once while Ray starts, and forks the workers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlctl.generation.spec import engine_kind
from rlctl.preflight.backend import trainer_module
from rlctl.preflight.placement import Placement
from rlctl.workers.preloading import ForkServer, ImportStage, preloading

# Environment variable with the folder of a server that has the imports of every run. The suite's runs share one.
SHARED_SERVER = "RLCTL_FORK_SERVER"


@contextmanager
def preload_workers(
    placement: Placement, backend: str | None, engine: str | None, logs: Path
) -> Iterator[ForkServer | None]:
    """Start a server with the imports of the workers of `placement`, and end it with the block.

    backend: name of the trainer's backend; None without a trainer. engine: name of the engines' kind; None without
    engines. Yields None if workers start as usual, which they do with GPUs.
    """
    if placement.device != "cpu":
        yield None
        return
    shared = os.environ.get(SHARED_SERVER)
    if shared:
        yield ForkServer(Path(shared), [len(placement.trainers)])
        return
    stages = []
    if backend:
        stages.append(trainer_stage(backend))
    if engine:
        stages.append(engine_stage(engine))
    workers = [len(placement.trainers)] if backend and engine else []
    with preloading(stages, logs / "imports.log") as folder:
        yield ForkServer(folder, workers)


def trainer_stage(backend: str) -> ImportStage:
    """Return the imports of a trainer's rank."""
    return ImportStage([trainer_module(backend), "rlctl.training.trainer_worker", "transformers"])


def engine_stage(engine: str) -> ImportStage:
    """Return the imports of an engine on a CPU."""
    kind = engine_kind(engine)
    return ImportStage(kind.imports, environment=kind.environment("cpu", [], []))
