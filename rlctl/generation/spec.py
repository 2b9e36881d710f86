"""Recipe of an engine: plain data that travels to its process; the kinds of engines by name."""

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
    """Answers of drawn lengths, log-normal: those of random weights say nothing about the lengths of real answers."""

    # Tokens, of the distribution before it is cut.
    mean: float
    # Standard deviation of its logarithm.
    sigma: float

    def draw(self, seed: int, limit: int) -> int:
        """Return the length of the rollout drawn with `seed`, from 1 to `limit` tokens."""
        number = np.random.default_rng(seed).standard_normal()
        length = round(self.mean * exp(self.sigma * number - self.sigma**2 / 2))
        return min(limit, max(1, length))


@dataclass(frozen=True)
class EngineSpec:
    """One engine. A kind passes over fields that it has no use for, unless answers depend on them (see `Engine`)."""

    # `generation.engine.name`.
    kind: str
    # The kind's keys: fields of `EngineKind.options`.
    options: Mapping[str, Any]
    model_path: str
    # float32 or bfloat16.
    dtype: str
    device: str
    max_model_len: int
    tensor_parallel_size: int
    max_num_seqs: int
    gpu_memory_utilization: float
    # Key-value cache of each device. None: the memory that `gpu_memory_utilization` leaves, as vLLM measures it.
    kv_cache_mib: int | None
    # Cuts of the distribution. Greedy and parity requests have none.
    top_p: float
    top_k: int
    # Tokens that end an answer, and are kept in it.
    stop_token_ids: tuple[int, ...]
    # Engines share the trainer's devices and free their memory while it works.
    sleeps: bool
    seed: int
    # "auto" reads the folder's weights; "dummy" draws others, and needs none on disk.
    load_format: str
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
    # Adapters of the weights of `model_path`, which stay as they are: a refit brings A and B alone. Before the
    # first they add nothing.
    adapters: AdapterSpec | None = None
    # PEFT's folder of the first adapters, where no refit brings them.
    adapter_folder: str | None = None


@dataclass(frozen=True)
class NoOptions:
    """Options of an engine that adds no key."""


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine: how its processes are made."""

    # Builds an engine, in its process.
    make: Callable[[EngineSpec], Engine]
    # Returns the environment variables of its process, set before anything imports torch. The arguments are the device
    # ("cpu" or "cuda"), its own GPUs, and other GPUs of the node, whose memory it reads in a refit.
    environment: Callable[[str, Sequence[str], Sequence[str]], dict[str, str]]
    # Dataclass of the keys that it adds. Those of a user's engine have their defaults there.
    options: type[Any] = NoOptions


def engine_kind(name: str) -> EngineKind:
    """Return the kind that `generation.engine` names. Raises the import's errors, AttributeError, or TypeError."""
    kind = load_object(ENGINES.get(name, name))
    if not isinstance(kind, EngineKind):
        raise TypeError(f"{name} is no EngineKind, but {type(kind).__name__}")
    return kind


def engine_options(section: EngineSection, device: Device) -> Mapping[str, Any]:
    """Return the values of the keys that an engine adds. Raises ConfigError for a wrong key."""
    if not isinstance(section, UserEngineSection):
        return engine_rules(section).options(section, device)
    options = engine_kind(section.name).options
    keys = checked_options(options, NoOptions, section.further, "generation.engine")
    return asdict(options(**keys))


def build_engine(spec: EngineSpec) -> Engine:
    """Build an engine, in its process. Its kind travels as a name: no other process imports a user's file."""
    return engine_kind(spec.kind).make(spec)
