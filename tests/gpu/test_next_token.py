"""Shortened steps on a GPU, where a step is scheduled before the last one's tokens are known."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.generation.engine import Engine
from tests.system.engines import spec_for
from tests.system.replayed_steps import DEADLINE, check_conversations, check_schedules, start_engines
from tests.tiny_models import make_model

pytestmark = pytest.mark.gpu


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.mark.skipif("gpus() < 1", reason="needs a CUDA device")
def test_a_shortened_step_samples_what_vllms_own_samples(ray_here: Path, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", max_length=256, seed=1, hidden=256, head_dim=64)
    spec = replace(spec_for(folder, 256), device="cuda", dtype="bfloat16", gpu_memory_utilization=0.1, kv_cache_mib=2)
    spec = replace(spec, stop_token_ids=(1, 5, 9), top_p=0.9, top_k=20, max_num_seqs=32, sleeps=True)
    engines = start_engines(spec, ["0"], ray_here)
    try:
        for engine in engines:
            engine.built().wait(DEADLINE)
        # Nothing is given up, which would happen at another step in each.
        check_conversations(engines, give_up=False)
        for engine in engines:
            # Writes to the device then go elsewhere.
            engine.start(Engine.sleep).wait(DEADLINE)
            engine.start(Engine.wake, "weights").wait(DEADLINE)
            engine.start(Engine.wake, "kv_cache").wait(DEADLINE)
        check_conversations(engines, give_up=False)
        for ahead in (False, True):
            # vLLM has other schedulers on GPUs than on a CPU: those of another version.
            check_schedules(engines, ahead)
    finally:
        for engine in engines:
            engine.kill()
