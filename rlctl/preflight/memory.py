"""Forecast of a run's memory, in bytes per device, from the model's sizes.

`placed_states` counts weights, gradients and optimizer state. Activations are an estimate after Korthikanti et al.
(arXiv 2205.05198, section 4): what a layer keeps of each token for its backward pass, counted tensor by tensor for a
gated MLP and attention that stores no scores. The reference is left out where there are GPUs: it is in host memory,
and its weights take the policy's own place while they are needed.
"""

from dataclasses import dataclass

from rlctl.config.schema import GrpoConfig
from rlctl.models.model_sizes import ModelSizes
from rlctl.preflight.backend import FLOAT32, State, backend_of
from rlctl.preflight.offload_plan import Phase
from rlctl.preflight.resolved import DTYPE_BYTES, Resolved
from rlctl.preflight.state_memory import PlacedState, placed_states

# Of a logit while the gradient of a chunk is made, as measured: torch keeps its steps apart unless it fuses them.
_LOGIT_BYTES, _FUSED_LOGIT_BYTES = 16, 8


@dataclass(frozen=True)
class Memory:
    """trainer: of one rank; engine: of one device of an engine (empty without one), by purpose.

    capacity: memory of the device, None when unknown. shared: rank and engine share it. kv_sequences: sequences of
    the longest kind that an engine's cache holds at a time, None when unknown. standing: of one rank, by phase.
    """

    trainer: dict[str, int]
    engine: dict[str, int]
    capacity: int | None
    shared: bool
    kv_sequences: int | None
    placed_states: dict[Phase, dict[State, PlacedState]]

    @property
    def state_peak(self) -> int:
        """Most that weights, gradients and optimizer state alone take of a device: no estimate is in it."""
        return max(sum(each.device for each in states.values()) for states in self.placed_states.values())

    @property
    def peak(self) -> int:
        """Most that is used of one device at a time."""
        trainer, engine = sum(self.trainer.values()), sum(self.engine.values())
        if not self.shared:
            return max(trainer, engine)
        resident = sum(each.device for each in self.placed_states["generate"].values())
        return max(trainer, resident + engine)


def forecast(resolved: Resolved, architecture: ModelSizes, longest: int | None, device_memory: int | None) -> Memory:
    """Return the forecast. On a CPU ranks and engines share `device_memory` at all times."""
    config = resolved.config
    trainer = _trainer(resolved, architecture)
    where = placed_states(resolved, architecture)
    if not isinstance(config, GrpoConfig):
        return Memory(trainer, {}, device_memory, shared=False, kv_sequences=None, placed_states=where)
    engine, per_token = _engine(resolved, config, architecture, device_memory)
    held = engine.get("key-value cache")
    sequences = held // (per_token * longest) if held is not None and longest else None
    if resolved.device == "cpu":
        # One machine holds every rank and every engine, all awake.
        trainer = {name: size * config.trainer.num_ranks for name, size in trainer.items()}
        engine = {name: size * config.generation.num_engines for name, size in engine.items()}
        both = trainer | {f"engines: {name}": size for name, size in engine.items()}
        return Memory(both, {}, device_memory, shared=False, kv_sequences=sequences, placed_states=where)
    shared = resolved.shares_devices
    return Memory(trainer, engine, device_memory, shared=shared, kv_sequences=sequences, placed_states=where)


def refit_bytes(resolved: Resolved, architecture: ModelSizes) -> int:
    """Return the bytes that one refit brings to each engine: every parameter once, tied embeddings too."""
    return architecture.parameters * DTYPE_BYTES[resolved.generation_dtype]


def activation_bytes(architecture: ModelSizes, tokens: int, size: int, residual: int, checkpointing: bool) -> int:
    """Bytes kept for the backward pass of `tokens` tokens; a number takes `size` bytes, one of the residual `residual`.

    A layer keeps the inputs and outputs of its two norms, q, k and v (twice with norms of their own), the
    attention's output, and of the MLP: gate, up, their activation and product. With checkpointing every layer
    keeps its input, and one layer at a time everything. The residual is what layers and norms take in.
    """
    hidden, queries = architecture.hidden, architecture.heads * architecture.head_dim
    keys = architecture.kv_heads * architecture.head_dim
    width = architecture.intermediate
    if architecture.sparse_layers:
        width = architecture.experts_per_token * architecture.expert_intermediate
    normed = queries + keys if architecture.qk_norm else 0
    layer = 2 * hidden * residual + (2 * hidden + 2 * queries + 2 * keys + normed + 4 * width) * size
    per_token = architecture.layers * hidden * residual + layer if checkpointing else architecture.layers * layer
    return tokens * per_token


def _trainer(resolved: Resolved, architecture: ModelSizes) -> dict[str, int]:
    config, cpu = resolved.config, resolved.device == "cpu"
    trainer, size = config.trainer, DTYPE_BYTES[resolved.dtype]
    backend = backend_of(trainer)
    shared = backend.shard_counts(trainer)
    # FSDP's root keeps embedding and output gathered; of the layers, the one at work and the next.
    gathered = (1 if architecture.tied else 2) * architecture.embedding_parameters + 2 * architecture.largest_layer
    residual = backend.residual_bytes(trainer, size)
    tokens, checkpointing = trainer.micro_batch_tokens, trainer.activation_checkpointing
    kept = activation_bytes(architecture, tokens, size, residual, checkpointing)
    held = backend.states(trainer, architecture, size).values()
    logit = _FUSED_LOGIT_BYTES if trainer.compile else _LOGIT_BYTES
    items = {each.name: each.device + each.host * cpu for each in held} | {
        "gathered layers": gathered * size * backend.gathers_layers(trainer, size),
        # A pipeline's first stage keeps as many micro-batches as there are stages, each of its share of the layers.
        "activations": kept // (shared.tensor * shared.context),
        "logits": trainer.logprob_chunk_tokens * architecture.vocab * logit // shared.tensor,
        # The sum over the chunks is float32, the product that each adds is of the compute dtype.
        "output's gradient": (FLOAT32 + size) * architecture.embedding_parameters // shared.tensor,
    }
    if cpu and isinstance(config, GrpoConfig) and config.grpo.loss.kl_coef > 0:
        items["reference"] = shared.of(architecture) * size
    return {name: count for name, count in items.items() if count}


def _engine(
    resolved: Resolved, config: GrpoConfig, architecture: ModelSizes, device_memory: int | None
) -> tuple[dict[str, int], int]:
    """(memory of one device of an engine by purpose, bytes of a cached token on it)."""
    size, devices = DTYPE_BYTES[resolved.generation_dtype], config.generation.tensor_parallel_size
    per_token = -(-architecture.kv_values_per_token * size // min(devices, architecture.kv_heads))
    items = {"weights": -(-architecture.parameters * size // devices)}
    if resolved.device == "cpu":
        items["key-value cache"] = config.generation.kv_cache_mib << 20
    elif device_memory is not None:
        usable = int(device_memory * config.generation.gpu_memory_utilization)
        items["key-value cache"] = max(0, usable - items["weights"])
    return items, per_token
