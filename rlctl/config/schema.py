"""What a run is: one dataclass a section, every field with its meaning and its limits, none with a default.

A key that is a Python keyword has an underscore behind it here (`async_`), and nowhere else.

Defaults stand in `configs/*.yaml` alone. `spec(...)` puts the one-line meaning and the allowed range beside
the field; `check.py` enforces both, and `rlctl config show` prints the meaning.
"""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from dataclasses import dataclass, field
from typing import Any, Literal

# Largest numbers that make sense: what is above is a slip, and its arithmetic would take for ever.
MOST_PROCESSES = 1 << 14
MOST_SEQUENCES = 1 << 20
MOST_SECONDS = 10**8


# The field of a section that takes any key: no key of its own, it holds those that no other field has.
FURTHER = "further"


def spec(doc: str, **limits: Any) -> Any:
    """A field without a default. `limits`: ge, gt, le, lt for numbers (for lists: of each element).

    most: a bound so far away that it is only spoken of when it is passed.

    path: what a text names, so that `paths.py` can look it up: "model" and "dataset" (a local path or a hub
    name), "template" (a file, or one of the field's literals), "plugin" (file.py:object, or no file at all),
    "folder" (one that need not exist).
    """
    return field(metadata={"doc": doc, **limits})


@dataclass
class RunSection:
    name: str | None = spec("name of the run and of its directory; null: KIND--MODEL--N, made up at start")
    dir: str = spec("folder that holds the run directories", path="folder")
    seed: int = spec("seed of everything random in the run", ge=0)
    probe: bool = spec("before step 1, compare weights and log-probs of trainer and generator; stop if they differ")
    log_every: int = spec("print a line every this many steps when the output is not a terminal", ge=1)
    deadline_s: float = spec("longest wait, in seconds, for any one answer of a worker", gt=0, most=MOST_SECONDS)
    explain_after_s: float = spec(
        "say who waits for whom when nothing came for this many seconds", gt=0, most=MOST_SECONDS
    )
    max_restarts: int = spec("times that the run begins again, at its last checkpoint, after it lost processes", ge=0)
    restart_backoff_s: float = spec(
        "pause before it does, in seconds; doubled each time, at most a minute", ge=0, most=MOST_SECONDS
    )


@dataclass
class ModelSection:
    path: str = spec("Hugging Face folder or hub name of a Llama, Qwen2, Qwen3 or Qwen3-MoE causal LM", path="model")
    tokenizer: str | None = spec("folder or hub name of the tokenizer; null: the model's own", path="model")
    random_init: bool = spec("start from random weights drawn by run.seed; the folder gives shape and tokenizer")
    max_length: int | None = spec(
        "longest sequence, prompt and answer; null: the model's max_position_embeddings", ge=2
    )


@dataclass
class DatasetSection:
    path: str | None = spec("JSONL or Parquet file, or hub dataset name[:configuration]; null: none", path="dataset")
    split: str = spec("split, or a slice of one: train[:90%], train[-10%:], train[10:20]; a file is its split train")
    prompt_key: str = spec("column of the prompt text; used when the messages column is absent")
    answer_key: str = spec(
        "column of the reference answer (grpo) or the response (sft): text, or a number, written as 42, 0.5"
    )
    messages_key: str = spec("column of chat messages, each {role, content}; content: text, or parts of text")
    limit: int | None = spec("use only the first this many rows; null: all", ge=1)


@dataclass
class DataSection:
    train: DatasetSection = spec("what is trained on")
    validation: DatasetSection = spec("what is validated on")
    system_prompt: str | None = spec("system message put before every prompt; needs a chat template")
    chat_template: Literal["auto", "none"] | str = spec(
        "auto: the tokenizer's own where it has one; none: plain text; else a Jinja file", path="template"
    )
    max_prompt_length: int | None = spec("prompts of more tokens are cut from the data set; null: no limit", ge=1)
    shuffle: bool = spec("a new order each epoch, drawn from run.seed")


@dataclass
class RewardSection:
    name: str = spec("exact, regex, math_verify, or yours: module:function or file.py:function", path="plugin")
    weight: float = spec("factor of this reward in the sum")
    correct_at: float | None = spec(
        "this reward decides whether an answer is right: its own value, before the weight, is at least this; null in "
        "all: the first reward decides, at 1"
    )
    pattern: str | None = spec("regex: the first group is compared with the answer; null elsewhere")
    timeout_s: float = spec("a reward that takes longer counts as failed for that rollout", gt=0, most=MOST_SECONDS)


@dataclass
class AdvantageSection:
    baseline: Literal["group_mean", "leave_one_out"] = spec("what a rollout's reward is compared with")
    normalize_std: bool = spec("divide by the group's standard deviation")


@dataclass
class LossSection:
    clip_low: float = spec("the ratio is clipped below at 1 - clip_low", ge=0, lt=1)
    clip_high: float = spec("the ratio is clipped above at 1 + clip_high", ge=0)
    dual_clip: float | None = spec("for negative advantages the loss is at most -A times this; null: off", gt=1)
    kl_coef: float = spec("weight of the KL to the reference; 0 loads no reference", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = spec("estimator of the KL")
    entropy_coef: float = spec("weight of the entropy bonus", ge=0)
    reduction: Literal["token", "sequence"] = spec("mean over all tokens of the update, or over sequences' own means")
    proximal: Literal["auto", "rollout", "recompute"] = spec(
        "old policy of the ratio: the generator's own log-probs, or the trainer's before the update (the decoupled "
        "objective); auto: rollout in a synchronous run, recompute in an asynchronous one"
    )
    force_on_policy_ratio: bool | None = spec(
        "recompute: take the policy being updated for the one before the update, which saves a pass over all tokens; "
        "null: where a step makes one update, so that they are the same"
    )
    importance_cap: float | None = spec(
        "recompute: weight tokens by min(proximal / rollout, this) (TIS); null: no correction by weight", gt=0
    )
    importance_mask: list[float] | None = spec(
        "recompute: leave out tokens whose proximal / rollout is outside [low, high] (IcePop); null: off", ge=0
    )
    sequence_mask: list[float] | None = spec(
        "recompute: leave out rollouts whose geometric mean of proximal / rollout is outside [low, high]; null: off",
        ge=0,
    )
    age_decay: float = spec(
        "clip_low, clip_high and importance_cap - 1 shrink by this for each step of age", gt=0, le=1
    )


@dataclass
class GrpoSection:
    num_steps: int = spec("steps of the whole run", ge=1, most=10**9)
    num_prompts_per_step: int = spec("prompts drawn for a step", ge=1, most=MOST_SEQUENCES)
    num_generations_per_prompt: int = spec("rollouts of each prompt: the group", ge=2, most=MOST_SEQUENCES)
    updates_per_step: int = spec("optimizer updates a step, each on an equal share of the groups", ge=1)
    skip_uniform_groups: bool = spec("leave out groups whose rewards are all equal: their advantage is 0")
    advantage: AdvantageSection = spec("advantage of a rollout within its group")
    loss: LossSection = spec("policy loss")


@dataclass
class AsyncSection:
    enabled: bool = spec("train and generate at the same time, on devices of their own")
    max_trajectory_age_steps: int = spec(
        "most steps that a group's oldest token may lag behind; 4 at most is wise", ge=1
    )
    in_flight_weight_updates: bool = spec("running rollouts go on across a refit; false: drain them first")
    recompute_kv_cache_after_weight_updates: bool = spec(
        "running rollouts compute their keys and values anew with the new weights; false: they keep them"
    )
    policy: Literal["windowed_fifo", "in_order", "ready_first"] = spec(
        "which complete groups train next: those within a window from the oldest on; strictly the oldest; any"
    )
    prefetch: Literal["auto", "full"] = spec(
        "groups on their way: as many as keep the trainer busy, or always as many as the bound allows"
    )
    streamed_training: bool = spec(
        "a step trains on the groups that are there while its last ones are sampled; with one update a step and no "
        "pass over log-probs before it"
    )
    window_fraction: float = spec(
        "windowed_fifo: groups beyond a step's worth, as a share of all that are active", ge=0
    )
    on_bound: Literal["wait", "requeue"] = spec(
        "when the oldest group must train now and is still being sampled: wait for it, or draw it anew, once"
    )


@dataclass
class OptimizerSection:
    name: Literal["adamw"] = spec("optimizer")
    lr: float = spec("peak learning rate", gt=0)
    betas: list[float] = spec("decay of AdamW's two moments", ge=0, lt=1)
    eps: float = spec("AdamW's epsilon", gt=0)
    weight_decay: float = spec("decoupled weight decay of matrices; norms and biases have none", ge=0)
    max_grad_norm: float = spec("gradients are scaled to at most this norm", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = spec("learning rate after warm-up")
    warmup_steps: int = spec("updates of linear warm-up", ge=0)
    min_lr_ratio: float = spec("lowest learning rate as a fraction of lr", ge=0, le=1)


@dataclass
class MegatronSection:
    tensor_model_parallel_size: int = spec("ranks that share each layer's matrices", ge=1)
    pipeline_model_parallel_size: int = spec("ranks that share the layers out, as stages (1F1B)", ge=1)
    context_parallel_size: int = spec("ranks that share the tokens of a pack", ge=1)
    expert_model_parallel_size: int = spec("ranks that share a layer's experts out", ge=1)
    sequence_parallel: bool | None = spec(
        "tensor-parallel ranks share the tokens between matrices too; null: where there are several"
    )
    fp32_residual_connection: bool = spec(
        "bfloat16: layers add to a float32 residual; log-probs are nearer to exact ones, activations take more memory"
    )
    optimizer_cpu_offload: bool = spec("optimizer state lives on the host and is updated there; it never moves")
    optimizer_offload_fraction: float | None = spec(
        "share of the parameters whose optimizer state lives on the host; null: all of them", gt=0, le=1
    )
    overlap_cpu_optimizer_d2h_h2d: bool = spec("copy gradients out and weights back while the host updates others")


@dataclass
class TrainerSection:
    backend: Literal["fsdp", "megatron"] = spec("what trains: torch FSDP2 or Megatron-core")
    num_ranks: int = spec("trainer processes, one a device", ge=1, most=MOST_PROCESSES)
    micro_batch_tokens: int = spec("tokens a rank packs into one forward pass", ge=1)
    dtype: Literal["auto", "float32", "bfloat16"] = spec("compute dtype; auto: float32 on CPU, bfloat16 on GPU")
    activation_checkpointing: bool = spec("recompute layers in the backward pass to save memory")
    logprob_chunk_tokens: int = spec("tokens whose logits exist at one time", ge=1)
    compile: bool = spec(
        "torch.compile each layer (fsdp), or norms and rotary embedding (megatron), and the loss; the first step takes "
        "up to a minute longer"
    )
    threads: int | None = spec(
        "CPU threads a rank; null: its share of the cores that engines beside it leave", ge=1, most=MOST_PROCESSES
    )
    offload_optimizer_for_logprob: bool = spec("move optimizer state to the host while log-probs are computed")
    offload_optimizer_for_generation: bool = spec(
        "engines on the trainer's GPUs: move optimizer state to the host before they wake, until the next update"
    )
    optimizer: OptimizerSection = spec("optimizer and schedule")
    megatron: MegatronSection = spec("backend megatron: how its ranks share the work")


@dataclass
class GenerationSection:
    num_engines: int = spec("vLLM engines", ge=1, most=MOST_PROCESSES)
    tensor_parallel_size: int = spec("devices an engine", ge=1, most=MOST_PROCESSES)
    dtype: Literal["auto", "float32", "bfloat16"] = spec("weights' dtype; auto: the trainer's compute dtype")
    max_new_tokens: int = spec("longest answer in tokens", ge=1)
    temperature: float = spec("sampling temperature; log-probs are of the tempered distribution", gt=0)
    top_p: float = spec("nucleus; below 1 the log-prob gap to the trainer grows", gt=0, le=1)
    top_k: int = spec("sample among this many tokens; 0: all", ge=0)
    stop_token_ids: list[int] = spec("tokens that end an answer beside those of model, tokenizer and template", ge=0)
    max_num_seqs: int = spec("sequences an engine decodes at a time", ge=1, most=MOST_SEQUENCES)
    gpu_memory_utilization: float = spec("share of a device an engine may use", gt=0, le=1)
    kv_cache_mib: int = spec("CPU: key-value cache of an engine, in MiB", ge=1, most=1 << 30)
    enforce_eager: bool | None = spec("no CUDA graphs; null: true on CPU, false on GPU")
    max_restarts: int = spec("dead engines replaced in a run before it stops", ge=0)
    max_generation_failures: int = spec("times that a group may lose its engine before it is dropped", ge=0)
    forced_lengths: list[float] | None = spec(
        "for measuring: answers of drawn lengths instead of stop tokens, log-normal, [mean, sigma]; null: off", gt=0
    )


@dataclass
class PlacementSection:
    wait_s: float = spec(
        "on a cluster: longest wait for room, of a run with --wait or one that begins again", ge=0, most=MOST_SECONDS
    )
    trainer: Literal["pack", "spread"] = spec("ranks on as few nodes as will do, or in turn on all that have room")
    cpus_per_process: float = spec("on a cluster without GPUs: CPUs that each rank and engine reserves", gt=0)


@dataclass
class GrpoPlacementSection(PlacementSection):
    generator: Literal["pack", "spread"] = spec("the same for engines; an engine's devices are of one node")
    colocated: bool | None = spec(
        "GPU: engines share the trainer's devices and sleep while it trains; null: unless async.enabled"
    )


@dataclass
class RefitSection:
    transport: Literal["auto", "shm", "ipc", "broadcast"] = spec(
        "shm: host memory; ipc: engines read the trainers' GPU memory; broadcast: NCCL, on CPU gloo; "
        "auto: shm on CPU, ipc on shared devices or from one rank to one engine, else broadcast"
    )
    mode: Literal["auto", "staged", "direct"] = spec(
        "staged: received beside the live weights while engines sample, then one short commit; direct: into the live "
        "weights, no extra memory; auto: staged where sampling goes on and memory allows"
    )
    num_buffers: int = spec(
        "buffers that weights pass through on their way, at each end; by broadcast from several ranks twice as many at "
        "an engine, for what cannot be received into place",
        ge=1,
    )
    buffer_memory_ratio: float = spec(
        "most that a buffer may take, as a share of device memory (never over 5 GiB)", gt=0, le=0.5
    )
    checksum: Literal["auto", "all", "sampled", "off"] = spec(
        "items whose bytes are compared at each refit; auto: all on CPU, one in 16 on GPU"
    )
    timeout_s: float = spec("longest that one end of a refit waits for the other, in seconds", gt=0, most=MOST_SECONDS)


@dataclass
class ValidationSection:
    every: int = spec("steps between validations; 0: never", ge=0)
    at_start: bool = spec("validate before step 1")
    num_generations: int = spec("answers a prompt: 1 gives accuracy, k gives pass@k too", ge=1, most=MOST_SEQUENCES)
    temperature: float = spec("0: greedy", ge=0)
    max_prompts: int | None = spec("use only the first this many prompts; null: all", ge=1)


@dataclass
class CheckpointSection:
    every: int = spec("steps between checkpoints; 0: none on the way", ge=0)
    at_end: bool = spec("also after the last step; a run that is stopped is saved in any case")
    keep_last: int = spec("newest checkpoints kept", ge=1)
    keep_best: int = spec("best checkpoints kept besides", ge=0)
    metric: str = spec("what best means: a metric name; the larger the better, or the smaller with a leading -")
    export: bool = spec("also write each checkpoint's weights as a Hugging Face folder")
    export_dtype: Literal["auto", "float32", "bfloat16"] = spec("of that folder; auto: the trainer's compute dtype")


@dataclass
class HealthSection:
    stop: bool = spec("a warning of the run's health stops the run, with a checkpoint; false: it is said and counted")
    max_grad_norm_ratio: float = spec(
        "warn of a gradient norm above this many times the median of the steps before", gt=1
    )
    grad_norm_window: int = spec("steps that this median is over; judged once half as many are there", ge=2)


@dataclass
class GrpoHealthSection(HealthSection):
    max_token_mult_prob_error: float = spec(
        "warn of a token_mult_prob_error above this: of a step's tokens in a synchronous run, of the tokens of "
        "parity_every in an asynchronous one, where a step's tokens are of older weights",
        gt=1,
    )
    parity_every: int = spec(
        "asynchronous: steps between comparisons of trainer and engines on a few tokens sampled under equal weights; "
        "0: never",
        ge=0,
    )
    max_non_finite_rollouts: float = spec(
        "rollouts with a log-prob that is NaN or infinite are left out; the run stops, before the update, if they are "
        "more than this share of a step's",
        ge=0,
        le=1,
    )
    max_accuracy_drop: float = spec(
        "warn when held-out accuracy is below its start by more than this share", ge=0, le=1
    )
    max_failed_reward_share: float = spec(
        "stop the run, with a checkpoint, when rewards failed for more than this share of a step's rollouts, "
        "failed_reward_steps steps in a row; 1: never",
        ge=0,
        le=1,
    )
    failed_reward_steps: int = spec("steps in a row that this takes", ge=1)


@dataclass
class SftHealthSection(HealthSection):
    max_loss_rise: float = spec("warn when the held-out loss is above its start by more than this, nats a token", ge=0)


@dataclass
class TensorBoardSection:
    name: Literal["tensorboard"] = spec("event files in the run directory")


@dataclass
class WandbSection:
    name: Literal["wandb"] = spec("Weights & Biases")
    project: str = spec("Weights & Biases project, for example {name: wandb, project: arithmetic}")


@dataclass
class UserTrackerSection:
    name: str = spec(
        "tensorboard, wandb, or yours: module:Class or file.py:Class, called with the run directory, the config and "
        "the further keys of its entry",
        path="plugin",
    )
    further: dict[str, Any] = spec("arguments of the class")


TrackerSection = TensorBoardSection | WandbSection | UserTrackerSection


@dataclass
class TelemetrySection:
    dashboard: Literal["auto", "on", "off"] = spec("auto: live view on a terminal, a line a step elsewhere")
    trackers: list[TrackerSection] = spec("what else gets the numbers of metrics.jsonl")
    rollouts_per_step: int = spec("rollouts written to rollouts.jsonl each step", ge=0)
    profile_updates: list[int] | None = spec(
        "profile the trainer in these updates after the start, [first, last], into profile/; null: off", ge=1
    )


@dataclass
class SftSection:
    num_steps: int = spec("steps of the whole run", ge=1, most=10**9)
    batch_size: int = spec("samples a step", ge=1, most=MOST_SEQUENCES)
    mask: Literal["all", "last"] = spec("train on every assistant turn, or on the last")


@dataclass
class CompiledGraphSection:
    enabled: bool | Literal["require"] = spec(
        "call trainer ranks through a Ray Compiled Graph; true: ordinary calls where there is none; require: or fail"
    )
    warmup_seq_len: int | None = spec("tokens of a warm-up sequence; null: the longest of the run", ge=1)
    warmup_gbs: int | None = spec("sequences of the warm-up; null: sft.batch_size", ge=1, most=MOST_SEQUENCES)
    overlap_communication: bool = spec("of accelerators within the graph; it has none, and the run says so")


@dataclass
class GrpoConfig:
    """A whole GRPO run (`rlctl train grpo`)."""

    kind: Literal["grpo"] = spec("kind of run")
    run: RunSection = spec("the run itself")
    model: ModelSection = spec("the policy")
    data: DataSection = spec("prompts")
    rewards: list[RewardSection] = spec("rewards, summed by weight; one of them decides what is right (correct_at)")
    grpo: GrpoSection = spec("the algorithm")
    async_: AsyncSection = spec("generation beside training")
    trainer: TrainerSection = spec("what learns")
    generation: GenerationSection = spec("what samples")
    placement: GrpoPlacementSection = spec("which nodes and devices the two stand on")
    refit: RefitSection = spec("from trainer to generator")
    validation: ValidationSection = spec("held-out prompts")
    checkpoint: CheckpointSection = spec("what is kept")
    health: GrpoHealthSection = spec("bounds on the run's health")
    telemetry: TelemetrySection = spec("what is shown")


@dataclass
class SftConfig:
    """A whole SFT run (`rlctl train sft`)."""

    kind: Literal["sft"] = spec("kind of run")
    run: RunSection = spec("the run itself")
    model: ModelSection = spec("the policy")
    data: DataSection = spec("samples")
    sft: SftSection = spec("the algorithm")
    ray_compiled_graph: CompiledGraphSection = spec("how the driver calls the trainer")
    trainer: TrainerSection = spec("what learns")
    placement: PlacementSection = spec("which nodes its ranks stand on")
    validation: ValidationSection = spec("held-out samples")
    checkpoint: CheckpointSection = spec("what is kept")
    health: SftHealthSection = spec("bounds on the run's health")
    telemetry: TelemetrySection = spec("what is shown")


RunConfig = GrpoConfig | SftConfig
KINDS: dict[str, type[GrpoConfig] | type[SftConfig]] = {"grpo": GrpoConfig, "sft": SftConfig}
