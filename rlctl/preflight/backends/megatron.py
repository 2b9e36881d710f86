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
from rlctl.preflight.parallel_layout import KEYS, Layout, clashes, instead, world_sizes
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
    own: MegatronSection = trainer.megatron
    return own


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
    own = megatron_of(trainer)
    if not own.optimizer_cpu_offload:
        return 0.0
    return 1.0 if own.optimizer_offload_fraction is None else own.optimizer_offload_fraction


class MegatronBackend(Backend):
    """Megatron-core."""

    shard_name, has_layouts = "data-parallel shard", True

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
        own = self.layout(trainer)
        return own.world if own.pipeline > 1 else math.lcm(own.tensor * own.context, own.expert)

    def check_keys(self, trainer: TrainerSection) -> Violations:
        if what := missing_megatron():
            yield Violation("trainer.backend", what)

    def check_unused(self, trainer: TrainerSection) -> Violations:
        for name, neutral in _NEUTRAL.items():
            # A broken one hides no other.
            with suppress(BrokenValueError):
                value = getattr(megatron_of(trainer), name)
                if value != neutral and value is not False:
                    why = f"{trainer.backend} has no such thing; set {dumps(neutral)} here"
                    what = f"{dumps(value)} needs trainer.backend=megatron: {why}"
                    yield Violation(f"{_SECTION}.{name}", what, ("trainer.backend",))

    def check_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int | None) -> Violations:
        """Yield one line a key."""
        asked = self.layout(trainer)
        found = list(clashes(asked, sizes))
        advice = instead(asked, sizes, sequences) if found else ""
        for name, what in found:
            if name == "world" and (counts := world_sizes(asked, sizes, sequences)):
                what += f"; try {KEYS['world']}={' or '.join(map(str, counts))}, or{advice.removeprefix('; try')}"
            else:
                what += advice
            yield Violation(KEYS[name], what, tuple(KEYS[other] for other in _AGAINST.get(name, ())))

    def check_model(self, trainer: TrainerSection, sizes: ModelSizes | None) -> Violations:
        if sizes is None:
            return
        kind, biased = sizes.model_type, sizes.output_bias or sizes.mlp_bias
        lacks = []
        if kind not in MODEL_TYPES:
            lacks.append(f"megatron trains {', '.join(MODEL_TYPES)}, not {kind}")
        elif biased or sizes.activation != "silu":
            lacks.append(
                f"megatron trains no {kind} {'with biases' if biased else f'with hidden_act {sizes.activation}'}"
            )
        elif sizes.sparse_layers and sizes.experts_per_token == 1 and sizes.norm_topk_prob:
            lacks.append("megatron has no router for one expert a token with norm_topk_prob, whose weight is always 1")
        yield from (
            Violation("trainer.backend", f"{what}; use trainer.backend=fsdp", ("model.path",)) for what in lacks
        )

    def check_optimizer(self, trainer: TrainerSection, sizes: ModelSizes | None) -> Violations:
        """Yield contradictions of `optimizer_cpu_offload`, and keys that need it."""
        own, key = megatron_of(trainer), f"{_SECTION}.optimizer_cpu_offload"
        if own.optimizer_cpu_offload:
            if what := cpu_offload_problem(trainer.dtype):
                yield Violation(key, what, ("trainer.dtype",))
            stages = own.pipeline_model_parallel_size
            if sizes is not None and sizes.tied and stages > 1 and hosted_share(trainer) < 1:
                # Each stage chooses its share for the host, and the two round differently: the copies would drift
                # apart.
                what = f"must be null with {stages} pipeline stages, whose first and last share the embedding"
                others = (f"{_SECTION}.pipeline_model_parallel_size",)
                yield Violation(f"{_SECTION}.optimizer_offload_fraction", what, others)
            return
        for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
            with suppress(BrokenValueError):
                if getattr(own, name):
                    what = f"needs {key}=true: without it nothing of the optimizer is on the host"
                    yield Violation(f"{_SECTION}.{name}", what, (key,))

    def idle_keys(self, trainer: TrainerSection) -> dict[str, str]:
        idle = {}
        if megatron_of(trainer).sequence_parallel and not self.layout(trainer).sequence_parallel:
            idle[KEYS["sequence"]] = f"{KEYS['tensor']} is 1"
        if megatron_of(trainer).fp32_residual_connection and trainer.dtype == "float32":
            idle[f"{_SECTION}.fp32_residual_connection"] = "trainer.dtype is float32"
        return idle

    def suggest_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int) -> str:
        return instead(self.layout(trainer), sizes, sequences)

    def shard_counts(self, trainer: TrainerSection) -> ShardCounts:
        """Share matrices over tensor ranks, layers over stages, optimizer state over ranks with the same weights."""
        layout, ranks = megatron_of(trainer), trainer.num_ranks
        tensor, stages = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
        # An expert is on one rank whole.
        experts = stages * layout.expert_model_parallel_size
        return ShardCounts(tensor, layout.context_parallel_size, tensor * stages, experts, max(tensor * stages, ranks))

    def states(self, trainer: TrainerSection, sizes: ModelSizes, size: int) -> dict[State, StateBytes]:
        """Return the bytes as if all stages were equal.

        Weights are in the compute dtype. The optimizer has float32 masters too if that is a half. Where the host
        updates a share of the parameters, their masters, a copy of their gradients and their moments are all there.
        """
        shared = self.shard_counts(trainer)
        weights, sharded = shared.rank_parameters(sizes), -(-sizes.parameters // shared.optimizer)
        away = hosted_share(trainer)
        masters = FLOAT32 if size < FLOAT32 else 0
        device, host = sharded * (masters + 2 * FLOAT32) * (1 - away), sharded * 4 * FLOAT32 * away
        return {
            "parameters": StateBytes(f"weights, {'bfloat16' if masters else 'float32'}", weights * size),
            "gradients": StateBytes("gradients", weights * FLOAT32),
            "optimizer": StateBytes("AdamW state", int(device), int(host)),
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
