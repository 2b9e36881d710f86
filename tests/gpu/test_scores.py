"""A vLLM engine on a GPU scores given tokens as transformers does in float32."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rlctl.generation.engine import Engine
from rlctl.generation.spec import build_engine
from rlctl.generation.vllm.kind import environment
from rlctl.workers.group import Worker, WorkerSpec
from tests.scored_tokens import DEADLINE, LONGEST, Transformers, draw_scored_tokens, score
from tests.system.engines import collect_all, spec_for
from tests.tiny_models import make_model

pytestmark = pytest.mark.gpu
# Weight version of the engine.
VERSION = 4


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), seed=3, hidden=256, head_dim=64, max_length=LONGEST)


@pytest.fixture(scope="module")
def engine(folder: Path, ray_here: Path) -> Iterator[Worker]:
    spec = replace(spec_for(folder, LONGEST), scores=True, version=VERSION, device="cuda", gpu_memory_utilization=0.2)
    spec = replace(spec, options={"fast_path": True, "enforce_eager": False}, kv_cache_mib=512)
    log = str(ray_here / "scores-gpu.log")
    # By default Triton multiplies float32 in TF32: gaps of 0.006 in the attention.
    variables = environment("cuda", ["0"]) | {"TRITON_F32_DEFAULT": "ieee"}
    worker = Worker(WorkerSpec("scores-gpu", partial(build_engine, spec), variables, log, 4))
    try:
        worker.built().wait(DEADLINE)
        yield worker
    finally:
        worker.kill()


@pytest.mark.skipif("gpus() < 1", reason="needs a CUDA device")
def test_scores_on_a_gpu_are_those_of_transformers(folder: Path, engine: Worker) -> None:
    # Three copies of the long sequence are more tokens than a step has: each is computed in several chunks.
    scored = draw_scored_tokens(copies=3)
    transformers = Transformers(folder)
    engine.start(Engine.submit, scored.sampled).wait(DEADLINE)
    collect_all(engine, scored.sampled)
    for _ in range(2):
        gap = transformers.largest_gap(scored.requests, score(engine, scored.requests), VERSION)
        print("largest gap to transformers on a CPU:", gap)
        assert gap < 1e-4
