"""`EngineSpec`, the plain data from which an engine is built in its process, and the kinds of engines by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp
from typing import Any

import numpy as np

from rlctl.config.grpo_schema import EngineSection, UserEngineSection
from rlctl.config.plugin_options import checked_options
from rlctl.config.plugins import ENGINES
from rlctl.generation.engine import Engine
from rlctl.models.adapters import AdapterSpec
from rlctl.preflight.engine_rules import engine_rules
from rlctl.preflight.machine import Device
from rlctl.utils.user_code import load_object


@dataclass(frozen=True)
class ForcedLengths:
    """Log-normal distribution of lengths at which answers end. It is for benchmarks with random weights, whose answers
    would not have realistic lengths."""

    # Mean number of tokens, before lengths are clipped to the limit.
    mean: float
    # Standard deviation of the logarithm of the length.
    sigma: float

    def draw(self, seed: int, limit: int) -> int:
        """Return the length of the rollout drawn with `seed`, from 1 to `limit` tokens."""
        number = np.random.default_rng(seed).standard_normal()
        length = round(self.mean * exp(self.sigma * number - self.sigma**2 / 2))
        return min(limit, max(1, length))


@dataclass(frozen=True)
class EngineSpec:
    """Specification of one engine. A kind may ignore fields that it does not need, except those that change answers
    (see `Engine`)."""

    # Name of the kind, from `generation.engine.name`.
    kind: str
    # Values of the kind's own keys, the fields of `EngineKind.options`.
    options: Mapping[str, Any]
    model_path: str
    # float32 or bfloat16.
    dtype: str
    device: str
    max_model_len: int
    tensor_parallel_size: int
    max_num_seqs: int
    gpu_memory_utilization: float
    # Size of the key-value cache on each device, MiB. None: all that `gpu_memory_utilization` leaves, as vLLM measures.
    kv_cache_mib: int | None
    # Truncation of the distribution. Greedy and parity requests ignore both.
    top_p: float
    top_k: int
    # Tokens that end an answer. The answer includes the token.
    stop_token_ids: tuple[int, ...]
    # True if the engine shares the trainer's devices, and frees its memory while the trainer works.
    sleeps: bool
    seed: int
    # "auto" reads the weights in `model_path`; "dummy" uses random weights, and needs none on disk.
    load_format: str
    # True if requests reuse the keys and values of a prefix that another request computed.
    prefix_caching: bool
    # True if new requests cannot use keys and values that were cached before a change of weights.
    reset_prefix_cache: bool
    # True if running requests recompute their keys and values after a change of weights.
    recompute_kv_cache: bool
    # Answers end at these lengths instead of at stop tokens; None: at stop tokens.
    forced_lengths: ForcedLengths | None
    # Version of the weights in `model_path`; -1 if a refit brings the first version.
    version: int = -1
    # LoRA adapters on the weights of `model_path`. The weights do not change: a refit only brings A and B. Before the
    # first refit, A and B are zero.
    adapters: AdapterSpec | None = None
    # PEFT folder from which A and B are loaded; None if a refit brings them.
    adapter_folder: str | None = None
    # True if the engine scores given tokens (`Engine.score`).
    scores: bool = False
    # True if the model has a value head: the engine values given tokens (`Engine.score`), and samples none.
    values: bool = False


@dataclass(frozen=True)
class NoOptions:
    """Options of a kind of engine that adds no keys."""


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine: how an engine and the environment of its process are made."""

    # Builds an engine; called in the engine's process.
    make: Callable[[EngineSpec], Engine]
    # Returns the environment variables of the engine's process, set before anything imports torch. Arguments: the
    # device ("cpu" or "cuda"), the engine's GPUs, and the node's other GPUs whose memory the engine reads in a refit.
    environment: Callable[[str, Sequence[str], Sequence[str]], dict[str, str]]
    # Dataclass of the keys that the kind adds to `generation.engine`. A user's engine sets their defaults there.
    options: type[Any] = NoOptions
    # Modules that the engine's process imports. On a CPU the process is forked from one with these imports done.
    imports: tuple[str, ...] = ()


def engine_kind(name: str) -> EngineKind:
    """Return the kind that `generation.engine` names. Raises the error of the import, AttributeError if the module has
    no such name, and TypeError if the object is no EngineKind."""
    kind = load_object(ENGINES.get(name, name))
    if not isinstance(kind, EngineKind):
        raise TypeError(f"{name} is no EngineKind, but {type(kind).__name__}")
    return kind


def engine_options(section: EngineSection, device: Device) -> Mapping[str, Any]:
    """Return the values of the keys that the engine's kind adds. Raises ConfigError for a wrong key."""
    if not isinstance(section, UserEngineSection):
        return engine_rules(section).options(section, device)
    options = engine_kind(section.name).options
    keys = checked_options(options, NoOptions, section.further, "generation.engine")
    return asdict(options(**keys))


def build_engine(spec: EngineSpec) -> Engine:
    """Build an engine. This is called in the engine's process, so that only this process imports a user's file."""
    return engine_kind(spec.kind).make(spec)
