"""Facts of Megatron-core: its parallel layouts, its distributed optimizer, and its CPU optimizer.

Every layout problem names the nearest valid layout. Two requirements of the CPU optimizer are always met: the
distributed optimizer is always used, and AdamW is the only optimizer.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from json import dumps

from rlctl.config.errors import BrokenValueError
from rlctl.config.fields import spec
from rlctl.config.trainer_schema import TrainerSection
from rlctl.models.facts import ModelSizes
from rlctl.preflight.backend import FLOAT32, Backend, ShardCounts, State, StateBytes, Violation, Violations
from rlctl.preflight.check_inputs import missing_megatron
from rlctl.preflight.parallel_layout import KEYS, Layout, find_clashes, suggest_layout, world_sizes
from rlctl.preflight.trainer_settings import TrainerSettings

_SECTION = "trainer.megatron"
# Model types that `training/megatron/` implements: their layers and the mapping of their weights' names.
MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
# Field of a `Layout` -> other fields that its problem may come from. The problem is shown at the one written last.
_AGAINST = {
    "world": ("tensor", "pipeline", "context"),
    "context": ("tensor",),
    "expert": ("world", "pipeline"),
    "sequence": ("tensor",),
}
# Key -> value that has no effect with another backend. false never has an effect either.
_NEUTRAL = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": None,
    "fp32_residual_connection": False,
    "optimizer_cpu_offload": False,
    "optimizer_offload_fraction": None,
    "overlap_cpu_optimizer_d2h_h2d": False,
}


@dataclass
class MegatronSection:
    """Keys of `trainer.megatron`. `configs/base.yaml` has the defaults."""

    tensor_model_parallel_size: int = spec("The ranks that share each layer's matrices.", ge=1)
    pipeline_model_parallel_size: int = spec("The ranks that share the layers, as stages (1F1B).", ge=1)
    context_parallel_size: int = spec("The ranks that share the tokens of a pack.", ge=1)
    expert_model_parallel_size: int = spec("The ranks that share the experts of a layer.", ge=1)
    sequence_parallel: bool | None = spec(
        "Tensor-parallel ranks also share the tokens between matrices. null is true if there are several such ranks."
    )
    fp32_residual_connection: bool = spec(
        "In bfloat16, layers add to a float32 residual. Log-probs are more exact then, activations take more memory."
    )
    optimizer_cpu_offload: bool = spec("Optimizer state is on the host and is updated there. It never moves.")
    optimizer_offload_fraction: float | None = spec(
        "The share of the parameters whose optimizer state is on the host. null is all of them.", gt=0, le=1
    )
    overlap_cpu_optimizer_d2h_h2d: bool = spec(
        "Copy gradients to the host and weights back while the host updates other parameters."
    )


def megatron_of(trainer: TrainerSection) -> MegatronSection:
    """Return the keys of `trainer.megatron`."""
    section: MegatronSection = trainer.megatron
    return section


def cpu_offload_problem(dtype: str) -> str | None:
    """Return why the CPU optimizer cannot update weights of `dtype`; None if it can, or if `dtype` is `auto`.

    In the distributed optimizer float32 weights have no main copy. Their shards are views of the weights, and torch's
    optimizers refuse views (`can't optimize a non-leaf Tensor`, megatron-core 0.16.1).
    """
    if dtype != "float32":
        return None
    return "needs trainer.dtype=bfloat16: Megatron-core's CPU optimizer fails on shards of float32 weights"


def hosted_share(trainer: TrainerSection) -> float:
    """Return the share, 0 to 1, of the parameters whose optimizer state is on the host."""
    section = megatron_of(trainer)
    if not section.optimizer_cpu_offload:
        return 0.0
    return 1.0 if section.optimizer_offload_fraction is None else section.optimizer_offload_fraction


class MegatronBackend(Backend):
    """The backend Megatron-core."""

    shard_name = "data-parallel shard"
    has_layouts = True

    def layout(self, trainer: TrainerSection) -> Layout:
        sizes = megatron_of(trainer)
        return Layout(
            trainer.num_ranks,
            tensor=sizes.tensor_model_parallel_size,
            pipeline=sizes.pipeline_model_parallel_size,
            context=sizes.context_parallel_size,
            expert=sizes.expert_model_parallel_size,
            sequence=sizes.sequence_parallel,
        )

    def ranks_a_copy(self, trainer: TrainerSection) -> int:
        """Return all ranks if there are pipeline stages, because the pipeline index changes slowest in the order of
        ranks.
        """
        layout = self.layout(trainer)
        # Dense weights repeat after tensor x context ranks, and experts after `expert` ranks.
        return layout.world if layout.pipeline > 1 else math.lcm(layout.tensor * layout.context, layout.expert)

    def check_keys(self, trainer: TrainerSection) -> Violations:
        if message := missing_megatron():
            yield Violation("trainer.backend", message)

    def check_unused(self, trainer: TrainerSection) -> Violations:
        for name, neutral in _NEUTRAL.items():
            # A broken value ends only that key's check.
            with suppress(BrokenValueError):
                value = getattr(megatron_of(trainer), name)
                if value != neutral and value is not False:
                    advice = f"{trainer.backend} has no such thing; set {dumps(neutral)} here"
                    message = f"{dumps(value)} needs trainer.backend=megatron: {advice}"
                    yield Violation(f"{_SECTION}.{name}", message, ("trainer.backend",))

    def check_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int | None) -> Violations:
        """Yield one violation per key, each with the nearest valid layout."""
        layout = self.layout(trainer)
        problems = list(find_clashes(layout, sizes))
        advice = suggest_layout(layout, sizes, sequences) if problems else ""
        for name, problem in problems:
            remedy = advice
            if name == "world" and (counts := world_sizes(layout, sizes, sequences)):
                remedy = f"; try {KEYS['world']}={' or '.join(map(str, counts))}, or{advice.removeprefix('; try')}"
            other_keys = tuple(KEYS[other] for other in _AGAINST.get(name, ()))
            yield Violation(KEYS[name], f"{problem}{remedy}", other_keys)

    def check_model(self, trainer: TrainerSection, sizes: ModelSizes | None) -> Violations:
        if sizes is None:
            return
        kind = sizes.model_type
        if kind not in MODEL_TYPES:
            message = f"megatron trains {', '.join(MODEL_TYPES)}, not {kind}"
        elif sizes.head_kind == "value":
            message = "megatron trains no model with a value head"
        elif sizes.output_bias or sizes.mlp_bias:
            message = f"megatron trains no {kind} with biases"
        elif sizes.activation != "silu":
            message = f"megatron trains no {kind} with hidden_act {sizes.activation}"
        elif sizes.sparse_layers and sizes.experts_per_token == 1 and sizes.norm_topk_prob:
            message = "megatron has no router for one expert a token with norm_topk_prob, whose weight is always 1"
        else:
            return
        yield Violation("trainer.backend", f"{message}; use trainer.backend=fsdp", ("model.path",))

    def check_optimizer(self, trainer: TrainerSection, sizes: ModelSizes | None) -> Violations:
        """Yield contradictions of `optimizer_cpu_offload`, and keys that need it."""
        section = megatron_of(trainer)
        key = f"{_SECTION}.optimizer_cpu_offload"
        if section.optimizer_cpu_offload:
            if problem := cpu_offload_problem(trainer.dtype):
                yield Violation(key, problem, ("trainer.dtype",))
            stages = section.pipeline_model_parallel_size
            if sizes is not None and sizes.tied and stages > 1 and hosted_share(trainer) < 1:
                # Each stage chooses its own parameters for the host, so one stage may update its copy of the embedding
                # on the host and the other on the device. The two round differently, and the copies would drift apart.
                message = f"must be null with {stages} pipeline stages, whose first and last share the embedding"
                stages_key = f"{_SECTION}.pipeline_model_parallel_size"
                yield Violation(f"{_SECTION}.optimizer_offload_fraction", message, (stages_key,))
            return
        for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
            with suppress(BrokenValueError):
                if getattr(section, name):
                    message = f"needs {key}=true: without it nothing of the optimizer is on the host"
                    yield Violation(f"{_SECTION}.{name}", message, (key,))

    def idle_keys(self, trainer: TrainerSection) -> dict[str, str]:
        reasons = {}
        if megatron_of(trainer).sequence_parallel and not self.layout(trainer).sequence_parallel:
            reasons[KEYS["sequence"]] = f"{KEYS['tensor']} is 1"
        if megatron_of(trainer).fp32_residual_connection and trainer.dtype == "float32":
            reasons[f"{_SECTION}.fp32_residual_connection"] = "trainer.dtype is float32"
        return reasons

    def suggest_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int) -> str:
        return suggest_layout(self.layout(trainer), sizes, sequences)

    def shard_counts(self, trainer: TrainerSection) -> ShardCounts:
        """Split matrices over tensor ranks, layers over stages, and optimizer state over all ranks."""
        layout = self.layout(trainer)
        weight_shards = layout.tensor * layout.pipeline
        return ShardCounts(
            tensor=layout.tensor,
            context=layout.context,
            weights=weight_shards,
            # Tensor ranks do not split an expert.
            experts=layout.pipeline * layout.expert,
            optimizer=max(weight_shards, trainer.num_ranks),
        )

    def states(self, trainer: TrainerSection, sizes: ModelSizes, size: int) -> dict[State, StateBytes]:
        """Return the bytes of one rank's states, assuming equal pipeline stages.

        Weights are in the compute dtype. If it has 16 bits, the optimizer also has float32 master weights. For
        parameters that the host updates, the masters, a copy of the gradients and both moments are on the host.
        """
        shards = self.shard_counts(trainer)
        weights = shards.rank_parameters(sizes)
        updated_weights = -(-sizes.parameters // shards.optimizer)
        host_share = hosted_share(trainer)
        master_bytes = FLOAT32 if size < FLOAT32 else 0
        device_bytes = updated_weights * (master_bytes + 2 * FLOAT32) * (1 - host_share)
        host_bytes = updated_weights * 4 * FLOAT32 * host_share
        return {
            "parameters": StateBytes(f"weights, {'bfloat16' if master_bytes else 'float32'}", weights * size),
            "gradients": StateBytes("gradients", weights * FLOAT32),
            "optimizer": StateBytes("AdamW state", int(device_bytes), int(host_bytes)),
        }

    def optimizer_on_host(self, trainer: TrainerSection) -> bool:
        """Return `optimizer_cpu_offload`. State that `optimizer_offload_fraction` leaves on the device never moves
        either.
        """
        return megatron_of(trainer).optimizer_cpu_offload

    def residual_bytes(self, trainer: TrainerSection, size: int) -> int:
        """Return 4 with `fp32_residual_connection`, else `size`."""
        return FLOAT32 if megatron_of(trainer).fp32_residual_connection else size

    def copied_weights(self, trainer: TrainerSettings, sizes: ModelSizes, size: int) -> int:
        """Return 0: a rank computes with its own shards and gathers no layers."""
        return 0

    def more_room(self, trainer: TrainerSection, peak: int, capacity: int) -> str:
        return "more ranks, a larger trainer.megatron.tensor_model_parallel_size or optimizer_cpu_offload take less"


BACKEND = MegatronBackend()
