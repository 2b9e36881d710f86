"""A vLLM engine scores given tokens as transformers does: any temperature, shared prefixes, long sequences."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rlctl.generation.engine import Engine
from rlctl.generation.requests import ScoreRequest
from rlctl.generation.spec import build_engine
from rlctl.generation.vllm.kind import environment
from rlctl.workers.errors import WorkerError
from rlctl.workers.group import Worker, WorkerSpec
from tests.scored_tokens import DEADLINE, LONGEST, Transformers, draw_scored_tokens, score
from tests.system.engines import collect_all, spec_for
from tests.tiny_models import make_model
from tests.turns import turn

# Weight version of the engine.
VERSION = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=3, max_length=LONGEST)


@pytest.fixture(scope="module")
def engine(folder: Path, ray_here: Path) -> Iterator[Worker]:
    spec = replace(spec_for(folder, LONGEST), scores=True, version=VERSION)
    worker = Worker(
        WorkerSpec("scores", partial(build_engine, spec), environment("cpu", []), str(ray_here / "scores.log"), 4)
    )
    try:
        worker.built().wait(DEADLINE)
        yield worker
    finally:
        worker.kill()


@pytest.mark.long
def test_scores_are_those_of_transformers(folder: Path, engine: Worker) -> None:
    scored = draw_scored_tokens(copies=1)
    transformers = Transformers(folder)
    engine.start(Engine.submit, scored.sampled).wait(DEADLINE)
    collect_all(engine, scored.sampled)
    for _ in range(2):
        gap = transformers.largest_gap(scored.requests, score(engine, scored.requests), VERSION)
        print("largest gap to transformers:", gap)
        assert gap < 1e-5
    # Turns and scores in one batch.
    mixed = [turn(10, index, scored.prompt, 40, seed=1) for index in range(6)]
    engine.start(Engine.submit, mixed).wait(DEADLINE)
    engine.start(Engine.score, scored.short).wait(DEADLINE)
    answers = collect_all(engine, [*mixed, *scored.short])
    assert transformers.largest_gap(scored.short, answers[len(mixed) :], VERSION) < 1e-5
    assert all(len(completion.tokens) for completion in answers[: len(mixed)])


@pytest.mark.long
def test_a_malformed_request_is_refused(engine: Worker) -> None:
    whole = ScoreRequest(turn(20).id, [5, 6, 7], 1)
    for wrong in (
        replace(whole, start=3),
        replace(whole, start=0),
        replace(whole, tokens=[5, 6, 99]),
        replace(whole, tokens=[5] * (LONGEST + 1)),
        replace(whole, ids=np.zeros((1, 2), np.int32)),
        replace(whole, ids=np.full((2, 1), 64, np.int32)),
        replace(whole, top=2, ids=np.zeros((2, 1), np.int32)),
        replace(whole, temperature=0.0),
    ):
        with pytest.raises(WorkerError, match="ValueError"):
            engine.start(Engine.score, [replace(whole, id=turn(21).id), wrong]).wait(DEADLINE)
    (finished,) = engine.start(Engine.collect, 0.2).wait(DEADLINE)
    assert not finished.ids
