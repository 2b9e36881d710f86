"""Recipe of an engine: plain data that travels to its process, and the environment that it needs there."""

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
    """Answers of drawn lengths, log-normal: those of random weights say nothing about the lengths of real answers."""

    # Tokens, of the distribution before it is cut.
    mean: float
    # Standard deviation of its logarithm.
    sigma: float

    def draw(self, seed: int, most: int) -> int:
        """Return the length of the rollout drawn with `seed`, from 1 to `most` tokens."""
        number = np.random.default_rng(seed).standard_normal()
        return min(most, max(1, round(self.mean * exp(self.sigma * number - self.sigma**2 / 2))))


@dataclass(frozen=True)
class EngineSpec:
    """One vLLM engine; `VLLM_FIELDS` are passed on to vLLM as they are."""

    model_path: str
    # float32 or bfloat16.
    dtype: str
    device: str
    max_model_len: int
    tensor_parallel_size: int
    max_num_seqs: int
    gpu_memory_utilization: float
    # Key-value cache of each device. None: what `gpu_memory_utilization` leaves, as vLLM measures it.
    kv_cache_mib: int | None
    enforce_eager: bool
    # Cuts of the distribution. Greedy and parity requests have none.
    top_p: float
    top_k: int
    # Tokens that end an answer, and are kept in it.
    stop_token_ids: tuple[int, ...]
    # Engines share the trainer's devices and free their memory while it works.
    sleeps: bool
    seed: int
    # vLLM's; "dummy" needs no weights on disk.
    load_format: str
    # Class mixed into vLLM's workers, "module.Class".
    extension: str
    # Rollouts have several turns, each a request that begins with the turns before it.
    turns: bool
    # Requests reuse keys and values of a prefix that another one computed.
    prefix_caching: bool
    # A change of weights puts the keys and values of before out of new requests' reach.
    reset_prefix_cache: bool
    # Running requests recompute keys and values after a change of weights.
    recompute_kv_cache: bool
    # Answers end by these instead of stop tokens.
    forced_lengths: ForcedLengths | None
    # Version of the weights in `model_path`; -1 where a refit brings the first.
    version: int = -1


VLLM_FIELDS = (
    "dtype",
    "seed",
    "max_model_len",
    "max_num_seqs",
    "tensor_parallel_size",
    "enforce_eager",
    "load_format",
)


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
