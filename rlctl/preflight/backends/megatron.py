"""Facts of Megatron-core: its parallel layouts, its distributed optimizer, its optimizer on the host.

Every problem of a layout ends with the nearest layout that works. Two of the CPU optimizer's rules hold by
construction: the distributed optimizer is always used, and AdamW is the only optimizer.
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
# Model types whose layers and mapping of names `training/megatron/` has.
MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
# Keys that each key may contradict, besides the model: the problem is shown at the last one written.
_AGAINST = {
    "world": ("tensor", "pipeline", "context"),
    "context": ("tensor",),
    "expert": ("world", "pipeline"),
    "sequence": ("tensor",),
}
# Values that ask for nothing, by key; false asks for nothing either.
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
    """Return why the CPU optimizer cannot update weights of `dtype`, or None. `auto` may be resolved to any.

    Under the distributed optimizer float32 weights have no main copy: their shards are views, which torch's optimizers
    refuse (`can't optimize a non-leaf Tensor`, megatron-core 0.16.1).
    """
    if dtype != "float32":
        return None
    return "needs trainer.dtype=bfloat16: Megatron-core's CPU optimizer fails on shards of float32 weights"


def hosted_share(trainer: TrainerSection) -> float:
    """Return the share of the parameters whose optimizer state lives on the host."""
    section = megatron_of(trainer)
    if not section.optimizer_cpu_offload:
        return 0.0
    return 1.0 if section.optimizer_offload_fraction is None else section.optimizer_offload_fraction


class MegatronBackend(Backend):
    """Megatron-core."""

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
        """Return all ranks where there are several stages: these are the slowest of the orders of ranks."""
        layout = self.layout(trainer)
        return layout.world if layout.pipeline > 1 else math.lcm(layout.tensor * layout.context, layout.expert)

    def check_keys(self, trainer: TrainerSection) -> Violations:
        if message := missing_megatron():
            yield Violation("trainer.backend", message)

    def check_unused(self, trainer: TrainerSection) -> Violations:
        for name, neutral in _NEUTRAL.items():
            # A broken value hides no other one.
            with suppress(BrokenValueError):
                value = getattr(megatron_of(trainer), name)
                if value != neutral and value is not False:
                    advice = f"{trainer.backend} has no such thing; set {dumps(neutral)} here"
                    message = f"{dumps(value)} needs trainer.backend=megatron: {advice}"
                    yield Violation(f"{_SECTION}.{name}", message, ("trainer.backend",))

    def check_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int | None) -> Violations:
        """Yield one line a key."""
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
                # Each stage chooses its share for the host, and the two round differently: the copies would drift
                # apart.
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
        """Share matrices over tensor ranks, layers over stages, optimizer state over ranks with the same weights."""
        layout = self.layout(trainer)
        weight_shards = layout.tensor * layout.pipeline
        return ShardCounts(
            tensor=layout.tensor,
            context=layout.context,
            weights=weight_shards,
            # One rank holds a whole expert.
            experts=layout.pipeline * layout.expert,
            optimizer=max(weight_shards, trainer.num_ranks),
        )

    def states(self, trainer: TrainerSection, sizes: ModelSizes, size: int) -> dict[State, StateBytes]:
        """Return the bytes as if all stages were equal.

        Weights are in the compute dtype. The optimizer has float32 masters too if that is a half. Where the host
        updates a share of the parameters, their masters, a copy of their gradients and their moments are all there.
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
        """Return `optimizer_cpu_offload`; the part that `optimizer_offload_fraction` leaves on the device stays too."""
        return megatron_of(trainer).optimizer_cpu_offload

    def residual_bytes(self, trainer: TrainerSection, size: int) -> int:
        """Return 4 with `fp32_residual_connection`."""
        return FLOAT32 if megatron_of(trainer).fp32_residual_connection else size

    def copied_weights(self, trainer: TrainerSettings, sizes: ModelSizes, size: int) -> int:
        """Return 0: a rank's layers are whole, or cut for good."""
        return 0

    def more_room(self, trainer: TrainerSection, peak: int, capacity: int) -> str:
        return "more ranks, a larger trainer.megatron.tensor_model_parallel_size or optimizer_cpu_offload take less"


BACKEND = MegatronBackend()
