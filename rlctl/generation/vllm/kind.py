"""vLLM as a kind of engine: the builder of its process, and the environment there. Imports neither vLLM nor torch."""

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
    """Build an engine, in its process. extension: class mixed into vLLM's workers, "module.Class"."""
    from rlctl.generation.vllm.engine import VllmEngine

    if spec.device != "cpu":
        # On a CPU engines compile nothing.
        keep_code(engine=True)
    engine = VllmEngine(spec, extension)
    # Falling asleep and waking collect garbage three times a step: a built engine is none.
    gc.collect()
    gc.freeze()
    return engine


def environment(device: str, devices: Sequence[str], beside: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables of an engine's process, to be set before anything imports torch or vllm.

    devices: the engine's own. beside: other GPUs of the node, whose memory it reads in a refit. The engine must see
    them: expandable segments of a device that it does not see are read at 364 GB/s instead of 383 (two H200s).

    The engine core runs in the actor's own process (weights change by a function call, and a token's version is
    exact). On CPU, dynamo would spend 19 s compiling two elementwise sampling operations, and two OpenMP
    threads would spin against the trainer's.
    """
    env = {**_QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if device == "cpu":
        return {**env, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return {**env, "CUDA_VISIBLE_DEVICES": ",".join([*devices, *beside])}


KIND = EngineKind(make_vllm_engine, environment, VllmOptions)
