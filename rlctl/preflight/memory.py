"""Forecast of a run's memory in bytes per device, from the model's sizes. Pure.

`placed_states` counts weights, gradients and optimizer state. The count is exact for FSDP (float32, sharded over the
ranks); for Megatron-core it assumes equal pipeline stages. On GPUs the weights of other roles, such as the reference,
are in host memory. For a forward pass they replace the policy's, or are on the device besides them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rlctl.config.trainer_schema import TrainerSection
from rlctl.models.adapters import AdapterSpec
from rlctl.models.facts import ModelSizes
from rlctl.preflight.backend import FLOAT32, STATES, State, StateBytes, backend_of
from rlctl.preflight.declared_columns import CRITIC, HeldRole, Role
from rlctl.preflight.machine import Device
from rlctl.preflight.trainer_settings import DTYPE_BYTES, Dtype, GenerationSettings, TrainerSettings
from rlctl.preflight.update_memory import divergence_bytes, kept_bytes

# Bytes per logit while a chunk's gradient is computed. The first is measured: torch keeps the result of each operation.
# The second is for compiled code: a logit and its gradient, plus half of that for the allocator.
_LOGIT_BYTES = 16
_FUSED_LOGIT_BYTES = 6
# Most NCCL groups of a refit by broadcast. Each group has some trainer ranks and all engine workers. An engine device
# has one communicator per group, and buffers for one sender of each. Kernels of groups wait for each other across
# devices, so all must fit on a device at once: more groups could deadlock.
REFIT_GROUPS = 2
# Bytes of a NCCL communicator on a device, within a node and between nodes: 0.5 to 1.6 GiB in NCCL's issues 864, 2363.
_COMMUNICATOR_BYTES = {"within": 1 << 29, "between": (1 << 34) // 10}
# Bytes that an engine needs for the CUDA context, graphs and the longest prefill.
_ENGINE_BYTES = 6 << 30
# Bytes that an engine needs per logit while it samples.
_SAMPLED_LOGIT_BYTES = 12
# Number of scored tokens whose logits exist at one time in an engine. A logit takes 10 bytes: bfloat16, float32 and its
# exponential.
SCORE_ROWS = 512
_SCORED_LOGIT_BYTES = 10
# Most tokens in a step of an engine that scores on GPUs. Longer prompts are computed in chunks.
SCORE_BATCH_TOKENS = 8192
# Tokens of a step for which an engine that scores on a CPU has a key-value cache.
_CPU_SCORE_TOKENS = 2048


# Table of where a trainer's state is in each phase of a step. A backend moves its tensors by this table
# (`training.offload`), and the forecast counts by it.
Phase = Literal["generate", "log_probs", "train", "refit", "checkpoint"]
# none: freed, and allocated again later.
Place = Literal["device", "host", "none"]
Residency = dict[Phase, dict[State, Place]]

PHASES: tuple[Phase, ...] = ("generate", "log_probs", "train", "refit", "checkpoint")


def residency(trainer: TrainerSection, shared: bool) -> Residency:
    """Return phase -> state -> place. shared: engines share the trainer's devices and sleep while it trains.

    In `generate` engines are awake and the trainer is idle. In `refit` and `checkpoint` engines are awake or wake up,
    so state on the host stays there. `log_probs` is the forward pass of policy and reference before the update. State
    on the host comes back to the device in `train` only.
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
    """Place of one state of a rank in one phase, and its bytes. Both are above 0 if the host updates only a part."""

    place: Place
    device: int
    host: int


@dataclass(frozen=True)
class Memory:
    """Forecast of the memory of one device."""

    # Bytes that one rank needs, by purpose, for example "activations".
    trainer: dict[str, int]
    # Bytes that an engine needs of one device, by purpose; empty without engines.
    engine: dict[str, int]
    # Total bytes of the device; None when unknown.
    capacity: int | None
    # True if rank and engine share the device.
    shared: bool
    # True if the engine keeps its memory while the rank trains.
    awake: bool
    # Number of sequences of the longest length that an engine's key-value cache holds; None when unknown.
    kv_sequences: int | None
    # States of one rank by phase.
    placed_states: dict[Phase, dict[State | Role, PlacedState]]
    # Other bytes of one rank in host memory, by purpose; empty on a CPU, where `trainer` contains them.
    host: dict[str, int]

    @property
    def state_peak(self) -> int:
        """Most bytes of weights, gradients and optimizer state on a device in any phase. The value is no estimate."""
        return max(self.state_bytes(phase) for phase in self.placed_states)

    @property
    def peak(self) -> int:
        """Most bytes in use on one device at a time."""
        trainer_total = sum(self.trainer.values())
        if "log_probs" in self.placed_states:
            # A forward pass without gradients needs these besides the states.
            passing = self.trainer.get("logits", 0) + self.trainer.get("weights to compute with", 0)
            trainer_total = max(trainer_total, self.state_bytes("log_probs") + passing)
        engine_total = sum(self.engine.values())
        if not self.shared:
            return max(trainer_total, engine_total)
        if self.awake:
            return trainer_total + engine_total
        return max(trainer_total, self.state_bytes("generate") + engine_total)

    def state_bytes(self, phase: Phase) -> int:
        """Return the bytes of all states on a device in one phase."""
        return sum(state.device for state in self.placed_states[phase].values())


def placed_states(
    trainer: TrainerSettings,
    sizes: ModelSizes,
    device: Device,
    shared: bool,
    phases: Iterable[Phase],
    frozen: Iterable[HeldRole] = (),
) -> dict[Phase, dict[State | Role, PlacedState]]:
    """Return phase -> state -> its location and bytes for one rank. Without GPUs all states are in host memory.

    shared: engines are on the trainer's devices. frozen: roles besides the policy, with weights on the host. Residents
    are on the device one at a time, so that each phase counts the largest.
    """
    table = residency(trainer, shared)
    state_bytes = backend_of(trainer).states(trainer, sizes, DTYPE_BYTES[trainer.dtype])
    held_roles = list(frozen)
    placed_by_phase: dict[Phase, dict[State | Role, PlacedState]] = {}
    for phase in phases:
        placed: dict[State | Role, PlacedState] = {}
        for state in STATES:
            placed[state] = _place_state(table[phase][state], state_bytes[state], is_cpu=device == "cpu")
        for role in held_roles:
            placed[role.name] = PlacedState("host", device=0, host=role.rank_bytes)
        if trainer.critic_bytes:
            placed[CRITIC] = PlacedState("device", device=trainer.critic_bytes, host=2 * trainer.critic_bytes)
        residents = [role for role in held_roles if role.is_resident and phase == role.phase]
        if residents and device == "cuda":
            largest = max(residents, key=lambda role: role.rank_bytes)
            placed[largest.name] = PlacedState("device", device=largest.rank_bytes, host=largest.rank_bytes)
        placed_by_phase[phase] = placed
    return placed_by_phase


def _place_state(place: Place, state_bytes: StateBytes, is_cpu: bool) -> PlacedState:
    if place == "none":
        return PlacedState("none", device=0, host=0)
    if is_cpu:
        return PlacedState("host", device=0, host=state_bytes.device + state_bytes.host)
    if place == "host" and state_bytes.host == 0:
        return PlacedState("host", device=0, host=state_bytes.device)
    # State that the host updates may have a part on the device. That part stays there.
    return PlacedState(place, device=state_bytes.device, host=state_bytes.host)


def trainer_bytes(
    trainer: TrainerSettings, sizes: ModelSizes, device: Device, frozen: Iterable[HeldRole] = ()
) -> dict[str, int]:
    """Return purpose -> bytes that a training rank needs. frozen: roles with weights on no GPU, see `placed_states`."""
    size = DTYPE_BYTES[trainer.dtype]
    backend = backend_of(trainer)
    shards = backend.shard_counts(trainer)
    states = backend.states(trainer, sizes, size)
    activations = kept_bytes(trainer, sizes, size, backend.residual_bytes(trainer, size))
    adapters = trainer.adapters
    if adapters:
        # Each adapter keeps the product of its input and A.
        layers = 1 if trainer.activation_checkpointing else sizes.layers
        layer_values = trainer.micro_batch_tokens * adapters.rank * len(adapters.targets) // sizes.layers
        activations += layer_values * layers * size
    logit_bytes = _FUSED_LOGIT_BYTES if trainer.compile else _LOGIT_BYTES
    chunk_tokens = trainer.logprob_chunk_tokens
    further_tokens = max(0, trainer.logprob_kept_tokens - chunk_tokens)
    if device == "cpu":
        items = {state.name: state.device + state.host for state in states.values()}
    else:
        items = {state.name: state.device for state in states.values()}
    items["weights to compute with"] = backend.copied_weights(trainer, sizes, size) * size
    # No division by pipeline stages: the first stage has 1/N of the layers and keeps N micro-batches at a time.
    items["activations"] = activations // (shards.tensor * shards.context)
    items["logits"] = (chunk_tokens * logit_bytes + further_tokens * size) * sizes.head_outputs // shards.tensor
    # Gradient of the output layer: a float32 sum over the chunks, and one chunk's product in the compute dtype.
    output_gradient = 0 if adapters else (FLOAT32 + size) * sizes.head_parameters // shards.tensor
    items["output's gradient"] = output_gradient
    if trainer.teacher:
        items |= divergence_bytes(trainer, trainer.teacher, sizes, device)
    if trainer.critic_bytes:
        # The peak is in the policy's turn, or in the critic's, which has gradients and two moments then.
        leaving_bytes = states["gradients"].device
        if trainer.offload_optimizer_for_generation:
            leaving_bytes += states["optimizer"].device
        items["critic"] = max(trainer.critic_bytes, 4 * trainer.critic_bytes - leaving_bytes)
    if trainer.one_micro_batch and backend.frees_gradients:
        # The only logits are freed before layers' gradients are allocated. Only gradients above their size add to a
        # peak.
        gradients = items.pop(states["gradients"].name)
        items["gradients after the logits"] = max(0, gradients - items["logits"] - output_gradient)
    if device == "cpu":
        items.update((role.name, role.rank_bytes) for role in frozen)
    return {name: count for name, count in items.items() if count}


def refit_bytes(sizes: ModelSizes, dtype: Dtype, adapters: AdapterSpec | None = None) -> int:
    """Return the bytes that a refit sends to each engine: all parameters, tied embeddings once; or the adapters."""
    return (adapters.parameters if adapters else sizes.parameters) * DTYPE_BYTES[dtype]


def communicator_bytes(nodes: int) -> int:
    """Return the most bytes that one refit communicator takes on a device. nodes: number of nodes that it spans."""
    return _COMMUNICATOR_BYTES["between" if nodes > 1 else "within"]


def copied_bytes(trainer: TrainerSettings, sizes: ModelSizes) -> int:
    """Return the bytes that a rank copies to host memory for a checkpoint: float32 weights and AdamW's two moments."""
    trained = trainer.adapters.parameters if trainer.adapters else sizes.parameters
    return -(-trained * 3 * FLOAT32 // trainer.num_ranks)


def engine_bytes(
    sizes: ModelSizes, device: Device, dtype: Dtype, tensor_parallel_size: int, max_num_seqs: int
) -> dict[str, int]:
    """Return purpose -> bytes that an engine needs of one device, without its key-value cache."""
    items = {"weights": -(-sizes.parameters * DTYPE_BYTES[dtype] // tensor_parallel_size)}
    if device == "cuda":
        items["graphs and workspace"] = _ENGINE_BYTES + max_num_seqs * sizes.vocab * _SAMPLED_LOGIT_BYTES
    return items


def token_bytes(sizes: ModelSizes, dtype: Dtype, tensor_parallel_size: int) -> int:
    """Return the bytes of one token in the key-value cache of one device; 0 for a model without attention."""
    shards = max(1, min(tensor_parallel_size, sizes.kv_heads))
    return -(-sizes.kv_values_per_token * DTYPE_BYTES[dtype] // shards)


def scoring_cache_tokens(device: Device, longest: int) -> int:
    """Return the tokens of the key-value cache of an engine that scores: one step's, and one sequence that waits."""
    return (SCORE_BATCH_TOKENS if device == "cuda" else _CPU_SCORE_TOKENS) + longest


def scoring_bytes(
    sizes: ModelSizes, device: Device, dtype: Dtype, tensor_parallel_size: int, longest: int
) -> dict[str, int]:
    """Return purpose -> bytes that an engine which scores given tokens needs of one device."""
    items = engine_bytes(sizes, device, dtype, tensor_parallel_size, max_num_seqs=0)
    tokens = scoring_cache_tokens(device, longest)
    items["key-value cache"] = tokens * token_bytes(sizes, dtype, tensor_parallel_size)
    items["logits"] = SCORE_ROWS * sizes.vocab * _SCORED_LOGIT_BYTES
    return items


def engine_items(
    generation: GenerationSettings, sizes: ModelSizes, device: Device, memory: int | None
) -> dict[str, int]:
    """Return purpose -> bytes that an engine needs of one device. memory: bytes of the device; None: not known."""
    items = engine_bytes(
        sizes=sizes,
        device=device,
        dtype=generation.dtype,
        tensor_parallel_size=generation.tensor_parallel_size,
        max_num_seqs=generation.max_num_seqs,
    )
    if generation.cache_mib is not None:
        items["key-value cache"] = generation.cache_mib << 20
        return items
    # Without a fixed cache size vLLM measures graphs and workspace itself, and gives the cache the rest of its share.
    del items["graphs and workspace"]
    if memory is not None:
        engine_share = int(memory * generation.gpu_memory_utilization)
        items["key-value cache"] = max(0, engine_share - items["weights"])
    return items


def show_bytes(count: int) -> str:
    """Return a number of bytes as text, in GiB or MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
