"""What an engine is made of: plain data that travels to its process, and the environment it needs there."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

_QUIET = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class ForcedLengths:
    """Answers of drawn lengths, log-normal: what random weights answer says nothing of how long real answers are.

    mean: of the distribution before it is cut, tokens. sigma: standard deviation of its logarithm.
    """

    mean: float
    sigma: float

    def draw(self, seed: int, most: int) -> int:
        """The length of the rollout drawn with `seed`, from 1 to `most` tokens."""
        number = np.random.default_rng(seed).standard_normal()
        return min(most, max(1, round(self.mean * exp(self.sigma * number - self.sigma**2 / 2))))


@dataclass(frozen=True)
class EngineSpec:
    """One vLLM engine. dtype: float32 or bfloat16. stop_token_ids: tokens that end an answer (kept in it).

    load_format: vLLM's; "dummy" needs no weights on disk. extension: class mixed into vLLM's workers.
    recompute_kv_cache: running requests compute keys and values anew after a change of weights. forced_lengths: answers
    end by these instead of stop tokens.
    """

    model_path: str
    dtype: str
    device: str
    max_model_len: int
    tensor_parallel_size: int
    max_num_seqs: int
    gpu_memory_utilization: float
    kv_cache_mib: int
    enforce_eager: bool
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    sleeps: bool
    seed: int
    load_format: str
    extension: str
    recompute_kv_cache: bool
    forced_lengths: ForcedLengths | None


def environment(device: str, devices: Sequence[str], beside: Sequence[str] = ()) -> dict[str, str]:
    """Environment variables of an engine's process; set before anything imports torch or vllm.

    devices: the engine's own. beside: other GPUs of the node, whose memory it reads in a refit. It is to see them:
    what a trainer holds in expandable segments of a device out of sight comes at 364 GB/s instead of 383 (two H200s).

    The engine core runs in the actor's own process (weights change by a function call, and a token's version is
    exact). On CPU, dynamo would spend 19 s compiling two elementwise sampling operations, and two OpenMP
    threads would spin against the trainer's.
    """
    env = {**_QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if device == "cpu":
        return {**env, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return {**env, "CUDA_VISIBLE_DEVICES": ",".join([*devices, *beside])}
