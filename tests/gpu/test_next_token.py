"""Shortened steps on a GPU, where a step is scheduled before the last one's tokens are known."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlctl.generation.spec import environment
from rlctl.workers.group import Worker, WorkerSpec
from tests.system.engines import spec_for
from tests.system.replayed_steps import DEADLINE, MakeWatched, WatchedEngine, conversations
from tests.tiny_models import make_model

pytestmark = pytest.mark.gpu


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.mark.skipif("gpus() < 1", reason="needs a CUDA device")
def test_a_shortened_step_samples_what_vllms_own_samples(ray_here: Path, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", max_length=256, seed=1, hidden=256, head_dim=64)
    spec = replace(spec_for(folder, 256), device="cuda", dtype="bfloat16", gpu_memory_utilization=0.1, kv_cache_mib=2)
    spec = replace(spec, stop_token_ids=(1, 5, 9), max_num_seqs=32)
    engines = [
        Worker(
            WorkerSpec(name, MakeWatched(spec, shortened), environment("cuda", ["0"]), str(ray_here / f"{name}.log"), 4)
        )
        for name, shortened in (("shortened", True), ("plain", False))
    ]
    try:
        for engine in engines:
            engine.built().wait(DEADLINE)
        # Nothing is given up, which would happen at another step in each.
        ours, plain = (conversations(engine, give_up=False) for engine in engines)
        for one, other in zip(ours, plain, strict=True):
            assert (one.tokens.tolist(), one.finish) == (other.tokens.tolist(), other.finish)
            assert np.array_equal(one.log_probs, other.log_probs)
        (shortened,), (own,) = (engine.start(WatchedEngine.blocks).wait(DEADLINE) for engine in engines)
        assert shortened == own and own["found"] > 500
    finally:
        for engine in engines:
            engine.kill()
