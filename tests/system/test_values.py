"""A vLLM engine values given tokens as transformers' sequence classifier does, alone and in any company."""

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
from tests.system.engines import collect_all, spec_for
from tests.turns import turn
from tests.value_models import class_values, make_reward_model

DEADLINE = 600.0


@pytest.mark.long  # builds an engine
def test_an_engine_values_the_last_token_as_transformers_does(ray_here: Path, tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "m", seed=3)
    spec = replace(spec_for(folder, 256), values=True, version=0, prefix_caching=False)
    log = str(ray_here / "values.log")
    engine = Worker(WorkerSpec("values", partial(build_engine, spec), environment("cpu", []), log, 4))
    draws = np.random.default_rng(0)
    lengths = [2, 3, 31, 32, 33, 100, 100, 255, 256]
    sequences = [draws.integers(3, 64, length).tolist() for length in lengths]
    # transformers' class looks for pad tokens: it would value the token before the last pad.
    sequences += [[5, 6, 0], [5, 0, 6]]
    try:
        engine.built().wait(DEADLINE)
        requests = [ScoreRequest(turn(0, index).id, tokens, len(tokens) - 1) for index, tokens in enumerate(sequences)]
        engine.start(Engine.score, requests).wait(DEADLINE)
        answers = collect_all(engine, requests)
        values = np.array([answer.columns["value"][0] for answer in answers])
        expected = np.array(class_values(folder, sequences[:-2]))
        np.testing.assert_allclose(values[:-2], expected, rtol=1e-5, atol=1e-5)
        assert all(answer.finish == "length" and answer.versions.tolist() == [0] for answer in answers)
        wrong = [
            replace(requests[2], start=1),
            replace(requests[2], top=1),
            ScoreRequest(turn(2).id, [5] * 257, 256),
        ]
        for request in wrong:
            with pytest.raises(WorkerError, match="ValueError"):
                engine.start(Engine.score, [request]).wait(DEADLINE)
        with pytest.raises(WorkerError, match="samples none"):
            engine.start(Engine.submit, [turn(3)]).wait(DEADLINE)
    finally:
        engine.kill()
