"""Contradictions of the parallel layout, the batch it splits and Megatron-core's CPU optimizer, as (key, what is wrong,
other keys).

One line a key, whatever it contradicts, and every line of a layout ends with the nearest one that works. Of the CPU
optimizer's rules two hold by construction: backend megatron always uses the distributed optimizer, and AdamW is the
only optimizer there is.
"""

from collections.abc import Iterator
from contextlib import suppress
from json import dumps

from rlctl.config.invalid import BrokenValueError
from rlctl.config.schema import MOST_SEQUENCES, GrpoConfig, RunConfig, TrainerSection
from rlctl.models.model_sizes import Architecture
from rlctl.preflight.check_inputs import missing_megatron
from rlctl.preflight.derived import sequences_per_update
from rlctl.preflight.parallel_layout import cpu_offload_problem, hosted_share, layout
from rlctl.preflight.suggest_layout import KEYS, clashes, instead, world_sizes

Found = Iterator[tuple[str, str, tuple[str, ...]]]
_SECTION = "trainer.megatron"
_MODEL = ("model.path",)
# What a key is judged against besides the model: the problem stands where the last of them was written.
_AGAINST = {
    "world": ("tensor", "pipeline", "context"),
    "context": ("tensor",),
    "expert": ("world", "pipeline"),
    "sequence": ("tensor",),
}
# What asks for nothing, of keys that only megatron has; false asks for nothing either.
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


def check_backend(trainer: TrainerSection) -> Found:
    """Keys of megatron under fsdp; megatron where it is not installed."""
    if trainer.backend == "megatron":
        if what := missing_megatron():
            yield "trainer.backend", what, ()
        return
    for name, neutral in _NEUTRAL.items():
        # One that is broken hides no other.
        with suppress(BrokenValueError):
            value = getattr(trainer.megatron, name)
            if value != neutral and value is not False:
                why = f"fsdp has no such thing; set {dumps(neutral)} here"
                yield (
                    f"{_SECTION}.{name}",
                    f"{dumps(value)} needs trainer.backend=megatron: {why}",
                    ("trainer.backend",),
                )


def check_megatron_model(trainer: TrainerSection, sizes: Architecture | None) -> Found:
    """What Megatron-core's layers, as rlctl builds them, cannot be."""
    if trainer.backend == "fsdp" or sizes is None:
        return
    biased = sizes.output_bias or sizes.mlp_bias
    if biased or sizes.activation != "silu":
        what = "with biases" if biased else f"with hidden_act {sizes.activation}"
        yield "trainer.backend", f"megatron trains no {sizes.model_type} {what}; use trainer.backend=fsdp", _MODEL
    if sizes.sparse_layers and sizes.experts_per_token == 1 and sizes.norm_topk_prob:
        what = "megatron has no router for one expert a token with norm_topk_prob, whose weight is always 1"
        yield "trainer.backend", f"{what}; use trainer.backend=fsdp", _MODEL


def check_layout(trainer: TrainerSection, sizes: Architecture | None, sequences: int | None) -> Found:
    """sizes: of the model, None when unknown. sequences: trained in one update, None when that is wrong itself."""
    if trainer.backend == "fsdp":
        return
    asked = layout(trainer)
    found = list(clashes(asked, sizes))
    advice = instead(asked, sizes, sequences) if found else ""
    for name, what in found:
        if name == "world" and (counts := world_sizes(asked, sizes, sequences)):
            what += f"; try {KEYS['world']}={' or '.join(map(str, counts))}, or{advice.removeprefix('; try')}"
        else:
            what += advice
        yield KEYS[name], what, tuple(KEYS[other] for other in _AGAINST.get(name, ()))


def check_cpu_optimizer(trainer: TrainerSection, sizes: Architecture | None) -> Found:
    """What `optimizer_cpu_offload` needs, and what needs it."""
    if trainer.backend == "fsdp":
        return
    own, key = trainer.megatron, f"{_SECTION}.optimizer_cpu_offload"
    if own.optimizer_cpu_offload:
        if what := cpu_offload_problem(trainer.dtype):
            yield key, what, ("trainer.dtype",)
        stages = own.pipeline_model_parallel_size
        if sizes is not None and sizes.tied and stages > 1 and hosted_share(trainer) < 1:
            # Each stage chooses what goes to the host, and the two round differently: the copies would drift apart.
            what = f"must be null with {stages} pipeline stages, whose first and last share the embedding"
            yield f"{_SECTION}.optimizer_offload_fraction", what, (f"{_SECTION}.pipeline_model_parallel_size",)
        return
    for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
        with suppress(BrokenValueError):
            if getattr(own, name):
                what = f"needs {key}=true: without it nothing of the optimizer is on the host"
                yield f"{_SECTION}.{name}", what, (key,)


def check_batch(config: RunConfig, sizes: Architecture | None) -> Found:
    """Every shard of an update needs a rollout or sample; under fsdp a shard is a rank."""
    trainer = config.trainer
    if isinstance(config, GrpoConfig):
        prompts, updates = config.grpo.num_prompts_per_step, config.grpo.updates_per_step
        if prompts % updates:
            near = max(updates, round(prompts / updates) * updates)
            what = f"{prompts} prompts cannot be shared equally among {updates} updates a step; try {near}"
            yield "grpo.num_prompts_per_step", what, ("grpo.updates_per_step",)
            return
        if prompts * config.grpo.num_generations_per_prompt > MOST_SEQUENCES:
            rollouts = f"{prompts:,} prompts x {config.grpo.num_generations_per_prompt:,} rollouts"
            what = f"{rollouts} are more than a step can hold, {MOST_SEQUENCES:,}"
            yield "grpo.num_generations_per_prompt", what, ("grpo.num_prompts_per_step",)
            return
    have, asked = sequences_per_update(config), layout(trainer)
    if have >= asked.data:
        return
    fsdp = trainer.backend == "fsdp"
    unit, advice = ("rank", "") if fsdp else ("data-parallel shard", instead(asked, sizes, have))
    if isinstance(config, GrpoConfig):
        what = f"{asked.data} {unit}s but only {have} rollouts an update: at least one a {unit} is needed{advice}"
        others = ("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "grpo.updates_per_step")
        yield "trainer.num_ranks", what, others
    else:
        what = f"must be at least the {asked.data} {unit}s of the trainer, not {have}{advice}"
        yield "sft.batch_size", what, ("trainer.num_ranks",)
