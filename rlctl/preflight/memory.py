"""Forecast of a run's memory, in bytes per device, from the model's sizes. Pure.

`placed_states` counts weights, gradients and optimizer state: exactly for FSDP (float32, sharded over the ranks), for
Megatron-core as if its stages were equal. Activations are an estimate after Korthikanti et al. (arXiv 2205.05198,
section 4): the bytes a layer keeps per token for its backward pass, counted tensor by tensor for a gated MLP and
attention that stores no scores. Where there are GPUs, the weights of further roles are in host memory and count on no
device: a pass puts them in the policy's own place.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rlctl.config.trainer_schema import TrainerSection
from rlctl.models.adapters import AdapterSpec
from rlctl.models.facts import ModelSizes
from rlctl.preflight.backend import FLOAT32, STATES, State, StateBytes, backend_of
from rlctl.preflight.declared_columns import Role
from rlctl.preflight.machine import Device
from rlctl.preflight.trainer_settings import DTYPE_BYTES, Dtype, GenerationSettings, TrainerSettings

# Bytes a logit while the gradient of a chunk is made. torch keeps its steps apart (measured) unless it fuses them: then
# there are a logit and its gradient, and half as much again for the allocator.
_LOGIT_BYTES, _FUSED_LOGIT_BYTES = 16, 6
# Groups of trainer ranks with all engine workers in a refit by broadcast, at most. Each is a communicator of every
# engine's device. An engine has buffers for one sender of each. Not more: the kernels of groups wait for each other
# across devices, and must all find room.
REFIT_GROUPS = 2
# Bytes of a communicator on its device, within a node and between nodes: NCCL's issues 864, 2363 have 0.5 to 1.6 GiB.
_COMMUNICATOR_BYTES = {"within": 1 << 29, "between": (1 << 34) // 10}
# Bytes of an engine for CUDA's context, graphs and the longest prefill, and for each logit that it samples from.
_ENGINE_BYTES, _SAMPLED_LOGIT_BYTES = 6 << 30, 12


# Table of where a trainer's state is in each phase of a step, for any backend. A backend moves its tensors by it
# (`training.offload`), the forecast counts by it, `--dry-run` prints it.
Phase = Literal["generate", "log_probs", "train", "refit", "checkpoint"]
# none: freed, and allocated again when it is needed.
Place = Literal["device", "host", "none"]
Residency = dict[Phase, dict[State, Place]]

PHASES: tuple[Phase, ...] = ("generate", "log_probs", "train", "refit", "checkpoint")


def residency(trainer: TrainerSection, shared: bool) -> Residency:
    """Return the table. shared: engines are on the trainer's devices and sleep while it trains.

    generate: engines are awake, the trainer rests. A refit and a checkpoint come while engines are awake or wake up, so
    state on the host stays there. log_probs: the pass of policy and reference before the update; state that was away
    until then comes back for the update alone.
    """
    pinned = backend_of(trainer).optimizer_on_host(trainer)
    for_engines = pinned or (shared and trainer.offload_optimizer_for_generation)
    for_log_probs = for_engines or trainer.offload_optimizer_for_logprob
    hosted: dict[Phase, bool] = {
        "generate": for_engines,
        "log_probs": for_log_probs,
        "train": pinned,
        "refit": for_engines,
        "checkpoint": for_engines,
    }
    return {
        phase: {
            "parameters": "device",
            "gradients": "device" if phase == "train" else "none",
            "optimizer": "host" if hosted[phase] else "device",
        }
        for phase in PHASES
    }


@dataclass(frozen=True)
class PlacedState:
    """Place of one rank's state in one phase, and its bytes on the device and in host memory.

    It has both at once where the host updates a part of the optimizer state.
    """

    place: Place
    device: int
    host: int


@dataclass(frozen=True)
class Memory:
    """Forecast of one device."""

    # Bytes of one rank by purpose.
    trainer: dict[str, int]
    # Bytes of one device of an engine by purpose; empty without engines.
    engine: dict[str, int]
    # Bytes of the device; None when unknown.
    capacity: int | None
    # True if rank and engine share the device.
    shared: bool
    # True if the engine keeps its memory while the rank trains.
    awake: bool
    # Sequences of the longest kind that an engine's cache holds at a time; None when unknown.
    kv_sequences: int | None
    # States of one rank by phase.
    placed_states: dict[Phase, dict[State | Role, PlacedState]]
    # Further bytes of one rank in host memory by purpose; empty on a CPU, where `trainer` has them.
    host: dict[str, int]

    @property
    def state_peak(self) -> int:
        """Largest sum of weights, gradients and optimizer state on a device. No estimate is in it."""
        return max(sum(each.device for each in states.values()) for states in self.placed_states.values())

    @property
    def peak(self) -> int:
        """Largest sum on one device at a time."""
        trainer, engine = sum(self.trainer.values()), sum(self.engine.values())
        if not self.shared:
            return max(trainer, engine)
        if self.awake:
            return trainer + engine
        resident = sum(each.device for each in self.placed_states["generate"].values())
        return max(trainer, resident + engine)


def placed_states(
    trainer: TrainerSettings,
    sizes: ModelSizes,
    device: Device,
    shared: bool,
    phases: Iterable[Phase],
    frozen: Iterable[Role] = (),
) -> dict[Phase, dict[State | Role, PlacedState]]:
    """Return the states by phase. Without a GPU all states are in host memory. shared: engines are on these devices.

    frozen: further roles. Their weights are on the host at all times: a pass puts them in the policy's place.
    """
    table = residency(trainer, shared)
    held = backend_of(trainer).states(trainer, sizes, DTYPE_BYTES[trainer.dtype])
    roles: dict[State | Role, PlacedState] = {
        role: PlacedState("host", 0, count) for role, count in _role_bytes(trainer, sizes, frozen).items()
    }
    return {
        phase: {state: _place_state(table[phase][state], held[state], device == "cpu") for state in STATES} | roles
        for phase in phases
    }


def _role_bytes(trainer: TrainerSettings, sizes: ModelSizes, frozen: Iterable[Role]) -> dict[Role, int]:
    """Return the bytes of one rank's part of each further role's weights, in the compute dtype."""
    return dict.fromkeys(
        frozen, backend_of(trainer).shard_counts(trainer).rank_parameters(sizes) * DTYPE_BYTES[trainer.dtype]
    )


def _place_state(place: Place, held: StateBytes, cpu: bool) -> PlacedState:
    if place == "none":
        return PlacedState("none", 0, 0)
    if cpu:
        return PlacedState("host", 0, held.device + held.host)
    # State on the host may have a part on the device, which stays; state that moves there moves whole.
    moved = place == "host" and held.host == 0
    return PlacedState(place, 0, held.device) if moved else PlacedState(place, held.device, held.host)


def activation_bytes(sizes: ModelSizes, tokens: int, size: int, residual: int, checkpointing: bool) -> int:
    """Return the bytes kept for the backward pass of `tokens` tokens.

    size: bytes of a number; residual: bytes of a number of the residual.

    A layer keeps the inputs and outputs of its two norms, q, k and v (twice if these have norms), the attention's
    output, and in the MLP: gate, up, their activation and product; a mixture also the inputs of all chosen experts.
    With checkpointing every layer keeps its input, and one layer at a time everything. The residual is the input of
    layers and norms.
    """
    hidden, queries = sizes.hidden, sizes.heads * sizes.head_dim
    keys = sizes.kv_heads * sizes.head_dim
    width = sizes.mlp_width
    # Every expert has its own copies of its tokens.
    copies = sizes.experts_per_token * hidden if sizes.experts else 0
    normed = queries + keys if sizes.qk_norm else 0
    layer = 2 * hidden * residual + (2 * hidden + 2 * queries + 2 * keys + normed + 4 * width + copies) * size
    per_token = sizes.layers * hidden * residual + layer if checkpointing else sizes.layers * layer
    return tokens * per_token


def kept_bytes(trainer: TrainerSettings, sizes: ModelSizes, size: int, residual: int) -> int:
    """Return the bytes that one micro-batch keeps for its backward pass; size, residual: see `activation_bytes`.

    Padded rows keep what `ModelSizes.row_bytes` recorded: scores too, the square of a row's length, if transformers'
    attention keeps them.
    """
    tokens, recomputed = trainer.micro_batch_tokens, trainer.activation_checkpointing
    recorded = next((each for each in sizes.row_bytes if each.dtype == trainer.dtype), None)
    if recorded is None or trainer.row_tokens is None:
        return activation_bytes(sizes, tokens, size, residual, recomputed)
    kept = tokens * (recorded.token + recorded.pair * min(tokens, trainer.row_tokens))
    return tokens * sizes.layers * sizes.hidden * residual + kept // sizes.layers if recomputed else kept


def trainer_bytes(
    trainer: TrainerSettings, sizes: ModelSizes, device: Device, frozen: Iterable[Role] = ()
) -> dict[str, int]:
    """Return the bytes of one rank by purpose. frozen: roles besides the policy, which a GPU does not hold."""
    cpu, size = device == "cpu", DTYPE_BYTES[trainer.dtype]
    backend = backend_of(trainer)
    shared = backend.shard_counts(trainer)
    residual = backend.residual_bytes(trainer, size)
    kept = kept_bytes(trainer, sizes, size, residual)
    held = backend.states(trainer, sizes, size)
    adapters = trainer.adapters
    if adapters:
        # Each keeps its product with A.
        layers = 1 if trainer.activation_checkpointing else sizes.layers
        kept += trainer.micro_batch_tokens * adapters.rank * len(adapters.targets) // sizes.layers * layers * size
    logit, chunk = _FUSED_LOGIT_BYTES if trainer.compile else _LOGIT_BYTES, trainer.logprob_chunk_tokens
    logits = chunk * logit + max(0, trainer.logprob_kept_tokens - chunk) * size
    items = {each.name: each.device + each.host * cpu for each in held.values()} | {
        "weights to compute with": backend.copied_weights(trainer, sizes, size) * size,
        # A pipeline's first stage keeps as many micro-batches as there are stages, each of its share of the layers.
        "activations": kept // (shared.tensor * shared.context),
        "logits": logits * sizes.vocab // shared.tensor,
        # The sum over the chunks is float32, the product that each adds is of the compute dtype.
        "output's gradient": 0 if adapters else (FLOAT32 + size) * sizes.embedding_parameters // shared.tensor,
    }
    if trainer.one_micro_batch and backend.frees_gradients:
        # No gradient is there while the only logits are; a layer's takes the place of its activations.
        gradients = items.pop(held["gradients"].name)
        items["gradients after the logits"] = max(0, gradients - items["logits"] - items["output's gradient"])
    if cpu:
        items.update((role, count) for role, count in _role_bytes(trainer, sizes, frozen).items())
    return {name: count for name, count in items.items() if count}


def refit_bytes(sizes: ModelSizes, dtype: Dtype, adapters: AdapterSpec | None = None) -> int:
    """Return the bytes that one refit brings to each engine: every parameter once, tied embeddings too; or adapters."""
    return (adapters.parameters if adapters else sizes.parameters) * DTYPE_BYTES[dtype]


def communicator_bytes(nodes: int) -> int:
    """Return the bytes of one communicator of a refit on its device, at most. nodes: of its members."""
    return _COMMUNICATOR_BYTES["between" if nodes > 1 else "within"]


def copied_bytes(trainer: TrainerSettings, sizes: ModelSizes) -> int:
    """Return the bytes that a rank copies to host memory for a checkpoint: float32 weights and both moments."""
    trained = trainer.adapters.parameters if trainer.adapters else sizes.parameters
    return -(-trained * 3 * FLOAT32 // trainer.num_ranks)


def engine_bytes(
    sizes: ModelSizes, device: Device, dtype: Dtype, tensor_parallel_size: int, max_num_seqs: int
) -> dict[str, int]:
    """Return the bytes of one device of an engine by purpose, but for its key-value cache."""
    items = {"weights": -(-sizes.parameters * DTYPE_BYTES[dtype] // tensor_parallel_size)}
    if device == "cuda":
        items["graphs and workspace"] = _ENGINE_BYTES + max_num_seqs * sizes.vocab * _SAMPLED_LOGIT_BYTES
    return items


def token_bytes(sizes: ModelSizes, dtype: Dtype, tensor_parallel_size: int) -> int:
    """Return the bytes of a cached token on one device of an engine; 0 for a model without attention."""
    return -(-sizes.kv_values_per_token * DTYPE_BYTES[dtype] // max(1, min(tensor_parallel_size, sizes.kv_heads)))


def engine_items(
    generation: GenerationSettings, sizes: ModelSizes, device: Device, memory: int | None
) -> dict[str, int]:
    """Return the bytes of one device of an engine by purpose. memory: of the device; None: not known."""
    devices, share = generation.tensor_parallel_size, generation.gpu_memory_utilization
    items = engine_bytes(sizes, device, generation.dtype, devices, generation.max_num_seqs)
    if generation.cache_mib is not None:
        return items | {"key-value cache": generation.cache_mib << 20}
    # vLLM measures graphs and workspace itself.
    del items["graphs and workspace"]
    return items if memory is None else items | {"key-value cache": max(0, int(memory * share) - items["weights"])}
