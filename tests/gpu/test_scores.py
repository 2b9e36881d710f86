"""A vLLM engine on a GPU scores given tokens as transformers does in float32."""

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
from rlctl.workers.group import Worker, WorkerSpec
from tests.system.engines import collect_all, spec_for
from tests.system.test_scores import DEADLINE, LONGEST, assert_is_right
from tests.tiny_models import make_model
from tests.turns import turn

pytestmark = pytest.mark.gpu


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), seed=3, hidden=256, head_dim=64, max_length=LONGEST)


@pytest.fixture(scope="module")
def engine(folder: Path, ray_here: Path) -> Iterator[Worker]:
    spec = replace(spec_for(folder, LONGEST), scores=True, version=4, device="cuda", gpu_memory_utilization=0.2)
    spec = replace(spec, options={"fast_path": True, "enforce_eager": False}, kv_cache_mib=512)
    log = str(ray_here / "scores-gpu.log")
    worker = Worker(WorkerSpec("scores-gpu", partial(build_engine, spec), environment("cuda", ["0"]), log, 4))
    try:
        worker.built().wait(DEADLINE)
        yield worker
    finally:
        worker.kill()


@pytest.mark.skipif("gpus() < 1", reason="needs a CUDA device")
def test_scores_on_a_gpu_are_those_of_transformers(folder: Path, engine: Worker) -> None:
    draws = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return draws.integers(3, 64, count).tolist()

    prompt = tokens(70)
    answer = tokens(90)
    requests = [
        ScoreRequest(turn(0, index).id, prompt + answer[: 30 + 20 * index], len(prompt), top=index * 5)
        for index in range(4)
    ]
    ids = draws.integers(0, 64, (len(answer), 3)).astype(np.int32)
    requests.append(ScoreRequest(turn(2).id, prompt + answer, len(prompt), ids=ids, temperature=1.3))
    # Sequences in several chunks of a step's tokens, the same one twice.
    long_tokens = tokens(LONGEST)
    requests += [ScoreRequest(turn(4, index).id, long_tokens, 1, top=20) for index in range(3)]
    sampled = [turn(9, index, prompt + answer, 4) for index in range(2)]
    engine.start(Engine.submit, sampled).wait(DEADLINE)
    collect_all(engine, sampled)
    for _ in range(2):
        engine.start(Engine.score, requests).wait(DEADLINE)
        answers = collect_all(engine, requests)
        gaps = [assert_is_right(folder, *pair) for pair in zip(requests, answers, strict=True)]
        print("largest gap to transformers on a CPU:", max(gaps))
        assert max(gaps) < 1e-4, gaps
