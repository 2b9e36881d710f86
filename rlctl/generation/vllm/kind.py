"""vLLM as an `EngineKind`: how to build the engine, and its environment variables. Imports neither vLLM nor torch."""

import gc
from collections.abc import Sequence

from rlctl.generation.engine import Engine
from rlctl.generation.spec import EngineKind, EngineSpec
from rlctl.preflight.engines.vllm import VllmOptions
from rlctl.utils.code_cache import keep_code

_QUIET = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}


def make_vllm_engine(spec: EngineSpec, extension: str = "rlctl.generation.vllm.worker_extension.RefitWorker") -> Engine:
    """Build an engine; called in its process. extension: class mixed into vLLM's workers, "module.Class"."""
    from rlctl.generation.vllm.engine import VllmEngine

    if spec.device != "cpu":
        # Keep compiled kernels for the next run. Engines on a CPU compile nothing.
        keep_code(engine=True)
    engine = VllmEngine(spec, extension)
    # `sleep` and `wake` collect garbage three times in a step. Exclude the objects of the built engine from that.
    gc.collect()
    gc.freeze()
    return engine


def environment(device: str, devices: Sequence[str], beside: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables of an engine's process, to be set before anything imports torch or vllm.

    devices: the engine's GPUs. beside: other GPUs of the node, whose memory the engine reads in a refit. They are made
    visible to the engine, because it reads expandable segments of an invisible GPU at 364 GB/s instead of 383 (two
    H200s).

    vLLM's engine core runs in the actor's own process, so that weights change by a function call and the version of
    each token is exact. On CPU, dynamo is off, since it would spend 19 s on compiling two elementwise sampling
    operations; one OpenMP thread is set, since two would compete with the trainer's threads.
    """
    env = {**_QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if device == "cpu":
        return {**env, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return {**env, "CUDA_VISIBLE_DEVICES": ",".join([*devices, *beside])}


# Modules of vLLM that an engine on a CPU imports while it is built.
_IMPORTS = (
    "rlctl.generation.vllm.engine",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)
KIND = EngineKind(make_vllm_engine, environment, VllmOptions, _IMPORTS)
