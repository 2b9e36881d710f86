"""Keys of TRL, verl and NeMo-RL, and former ones of rlctl, with the key that means the same: answers to unknown keys.

They were read from TRL 1.9 (with transformers' TrainingArguments), verl of January 2026 and NeMo-RL of 2025. Each row
has a tool's key, our key or keys, and a note if unit or meaning differ. Without a key of ours, the note names what
rlctl does not have.
"""

from typing import NamedTuple


class PeerKey(NamedTuple):
    """A key of another tool, and what means the same here."""

    tool: str
    key: str
    # Keys joined by `and` or `or`; empty if there is none.
    ours: str
    note: str = ""


_LORA = "LoRA: every weight of the model is trained"
_EPOCHS = "epochs; count steps: a step draws grpo.num_prompts_per_step prompts, or sft.batch_size samples"
_STEPS = "grpo.num_steps or sft.num_steps"
_SIZE = "grpo.num_prompts_per_step or sft.batch_size"
_MICRO = "trainer.micro_batch_tokens"
_FILTER, _EXTRA = "grpo.dynamic_sampling.filter", "grpo.dynamic_sampling.max_extra"
_CRITIC = "critic: baselines are of the group"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

_TRL = (
    ("beta", "grpo.loss.kl_coef"),
    ("epsilon", "grpo.loss.clip_low and grpo.loss.clip_high", "its epsilon is both where epsilon_high is not set"),
    ("epsilon_high", "grpo.loss.clip_high"),
    ("delta", "grpo.loss.dual_clip"),
    ("num_generations", "grpo.num_generations_per_prompt"),
    ("num_generations_eval", "validation.num_generations"),
    ("max_completion_length", "generation.max_new_tokens"),
    ("vllm_max_model_length", "model.max_length"),
    ("per_device_train_batch_size", _SIZE, "of all devices together, and of prompts, not of their completions"),
    ("gradient_accumulation_steps", _MICRO, "it follows: a rank packs so many tokens into each pass"),
    ("generation_batch_size", "grpo.num_prompts_per_step", "prompts, not their completions"),
    ("steps_per_generation", "grpo.updates_per_step"),
    ("num_iterations", "", "second pass over a batch; grpo.updates_per_step splits a step into several updates"),
    ("learning_rate", "trainer.optimizer.lr"),
    ("lr_scheduler_type", "trainer.optimizer.schedule", "constant, linear or cosine; warmup_steps goes with each"),
    ("adam_epsilon", "trainer.optimizer.eps"),
    ("num_train_epochs", "", _EPOCHS),
    ("max_steps", _STEPS),
    (
        "scale_rewards",
        "grpo.advantage.normalize_std",
        "its group is true, its none is false, its batch is grpo.advantage.name=batch_normalized",
    ),
    ("multi_objective_aggregation", "grpo.advantage.name", "its normalize_then_sum is gdpo"),
    ("reward_weights", "rewards.N.weight", "each reward holds its own"),
    ("reward_funcs", "rewards", "a list of {name: file.py:function}"),
    ("loss_type", "grpo.loss.name", "its dapo is grpo, its grpo has reduction sequence; dr_grpo and cispo too"),
    ("importance_sampling_level", "grpo.loss.name", "its sequence is gspo"),
    ("mask_truncated_completions", "grpo.overlong.mask"),
    ("vllm_importance_sampling_correction", "grpo.loss.importance_cap", "null is off"),
    ("vllm_importance_sampling_clip_max", "grpo.loss.importance_cap", "truncates; grpo.loss.importance_mask masks"),
    ("vllm_gpu_memory_utilization", "generation.gpu_memory_utilization"),
    ("vllm_tensor_parallel_size", "generation.tensor_parallel_size"),
    ("vllm_mode", "placement.colocated", "its colocate is true, its server is false; rlctl starts the engines"),
    ("use_vllm", "", "other engine than vLLM"),
    ("min_p", "", "min_p: it samples by temperature, top_p and top_k"),
    ("repetition_penalty", "", "repetition penalty: log-probs would not be the policy's"),
    ("sync_ref_model", "", "reference that moves: it is the policy before step 1"),
    ("gradient_checkpointing", "trainer.activation_checkpointing"),
    ("bf16", "trainer.dtype", "bfloat16"),
    ("model_name_or_path", "model.path"),
    ("output_dir", "run.dir and run.name", "the run's folder is dir/name"),
    ("save_steps", "checkpoint.every"),
    ("eval_steps", "validation.every"),
    ("logging_steps", "run.log_every"),
    ("save_total_limit", "checkpoint.keep_last"),
    (
        "report_to",
        "telemetry.trackers",
        "a list, such as [tensorboard, {name: wandb, project: ...}]",
    ),
    ("deepspeed", "trainer.backend", "fsdp shards weights, gradients and optimizer state over the ranks (ZeRO-3)"),
    ("assistant_only_loss", "sft.mask", "all trains on every assistant turn, last on the last; prompts never"),
    ("packing", _MICRO, "samples are always packed, up to so many tokens"),
    ("use_peft", "", _LORA),
    ("peft_config", "", _LORA),
    ("lora", "", _LORA),
    ("lora_r", "", _LORA),
    ("lora_alpha", "", _LORA),
    ("load_in_4bit", "", "quantised training"),
)
_VERL = (
    (f"{_ROLLOUT}.n", "grpo.num_generations_per_prompt"),
    (f"{_ROLLOUT}.temperature", "generation.temperature"),
    (f"{_ROLLOUT}.top_k", "generation.top_k", "0 is all, where its -1 is"),
    (f"{_ROLLOUT}.tensor_model_parallel_size", "generation.tensor_parallel_size"),
    (f"{_ROLLOUT}.val_kwargs.n", "validation.num_generations"),
    (f"{_ROLLOUT}.val_kwargs.temperature", "validation.temperature"),
    (f"{_ROLLOUT}.name", "", "other engine than vLLM"),
    (f"{_ACTOR}.optim.lr", "trainer.optimizer.lr"),
    (f"{_ACTOR}.optim.lr_warmup_steps", "trainer.optimizer.warmup_steps"),
    (f"{_ACTOR}.kl_loss_coef", "grpo.loss.kl_coef"),
    (f"{_ACTOR}.use_kl_loss", "grpo.loss.kl_coef", "above 0 is on"),
    (f"{_ACTOR}.kl_loss_type", "grpo.loss.kl_estimator", "its kl is k1, its mse k2, its low_var_kl k3"),
    (f"{_ACTOR}.ppo_mini_batch_size", "grpo.updates_per_step", "how many updates, not how large each is"),
    (f"{_ACTOR}.ppo_micro_batch_size_per_gpu", _MICRO, "in tokens, not in sequences"),
    (f"{_ACTOR}.ppo_max_token_len_per_gpu", _MICRO),
    (f"{_ACTOR}.ppo_epochs", "", "second pass over a batch; grpo.updates_per_step splits a step into several updates"),
    (f"{_ACTOR}.clip_ratio", "grpo.loss.clip_low and grpo.loss.clip_high"),
    (f"{_ACTOR}.clip_ratio_low", "grpo.loss.clip_low"),
    (f"{_ACTOR}.clip_ratio_high", "grpo.loss.clip_high"),
    (f"{_ACTOR}.clip_ratio_c", "grpo.loss.dual_clip", "null is off"),
    (f"{_ACTOR}.policy_loss.loss_mode", "grpo.loss.name", "its vanilla is grpo, its dppo_tv dppo; gspo and cispo too"),
    (f"{_ACTOR}.entropy_coeff", "grpo.loss.entropy_coef"),
    (f"{_ACTOR}.loss_agg_mode", "grpo.loss.reduction", "its token-mean is token, its seq-mean-token-mean is sequence"),
    (f"{_ACTOR}.grad_clip", "trainer.optimizer.max_grad_norm"),
    (f"{_ACTOR}.strategy", "trainer.backend"),
    ("actor_rollout_ref.model.path", "model.path"),
    ("actor_rollout_ref.model.lora_rank", "", _LORA),
    ("actor_rollout_ref.model.enable_gradient_checkpointing", "trainer.activation_checkpointing"),
    ("data.train_batch_size", "grpo.num_prompts_per_step"),
    ("data.max_response_length", "generation.max_new_tokens"),
    ("data.train_files", "data.train.path", "one file"),
    ("data.val_files", "data.validation.path", "one file"),
    ("data.train_max_samples", "data.train.limit", "null is all, where its -1 is"),
    ("data.filter_overlong_prompts", "data.max_prompt_length", "longer prompts are always left out"),
    (
        "algorithm.adv_estimator",
        "grpo.advantage.name",
        "its grpo is group_mean, its rloo leave_one_out, its reinforce_plus_plus batch_normalized with baseline none, "
        "its reinforce_plus_plus_baseline batch_normalized with baseline group_mean",
    ),
    ("algorithm.norm_adv_by_std_in_grpo", "grpo.advantage.normalize_std"),
    ("algorithm.use_kl_in_reward", "", "KL in the reward: grpo.loss.kl_coef puts it into the loss"),
    ("algorithm.gamma", "", "discount: every token of a rollout has its advantage"),
    (
        "algorithm.filter_groups.metric",
        _FILTER,
        "its acc is accuracy, its score and seq_reward are rewards; null is off",
    ),
    ("algorithm.filter_groups.max_num_gen_batches", _EXTRA, "of further batches: its number less 1"),
    ("custom_reward_function.path", "rewards", "a list of {name: file.py:function}"),
    ("critic", "", _CRITIC),
    (
        "reward_model",
        "",
        "reward model: a reward is a function, which may call one; its overlong_buffer is grpo.overlong",
    ),
    ("trainer.total_epochs", "", _EPOCHS),
    ("trainer.total_training_steps", _STEPS),
    ("trainer.n_gpus_per_node", "trainer.num_ranks", "one rank a device, over all nodes"),
    ("trainer.nnodes", "", "number of nodes in a run: --cluster NAME says where it runs"),
    ("trainer.save_freq", "checkpoint.every", "0 is never, where its -1 is"),
    ("trainer.test_freq", "validation.every", "0 is never, where its -1 is"),
    ("trainer.val_before_train", "validation.at_start"),
    ("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last"),
    ("trainer.default_local_dir", "run.dir and run.name", "the run's folder is dir/name"),
    ("trainer.project_name", "telemetry.trackers", "[{name: wandb, project: ...}]"),
    ("trainer.experiment_name", "run.name"),
    (
        "trainer.logger",
        "telemetry.trackers",
        "a list, such as [tensorboard, {name: wandb, project: ...}]",
    ),
    ("trainer.resume_mode", "", "key for it: rlctl train KIND --resume RUN"),
)
_NEMO = (
    ("grpo.max_num_steps", "grpo.num_steps"),
    ("grpo.max_num_epochs", "", _EPOCHS),
    (
        "grpo.adv_estimator.name",
        "grpo.advantage.name",
        "its grpo is leave_one_out or group_mean, its reinforce_plus_plus is batch_normalized",
    ),
    ("grpo.adv_estimator.minus_baseline", "grpo.advantage.baseline", "its true is group_mean, its false is none"),
    ("grpo.normalize_rewards", "grpo.advantage.normalize_std"),
    ("grpo.use_leave_one_out_baseline", "grpo.advantage.name", "leave_one_out or group_mean"),
    ("grpo.overlong_filtering", "grpo.overlong.mask"),
    ("grpo.use_dynamic_sampling", _FILTER, "rewards is its true"),
    ("grpo.dynamic_sampling_max_gen_batches", _EXTRA, "of further batches: its number less 1"),
    ("grpo.batch_multiplier", _EXTRA, "rlctl begins as many groups ahead of need as the last steps filtered"),
    ("grpo.reward_shaping.overlong_buffer_length", "grpo.overlong.penalty_tokens", "null is off"),
    ("grpo.reward_shaping.overlong_buffer_penalty", "grpo.overlong.penalty"),
    ("grpo.reward_shaping.max_response_length", "generation.max_new_tokens"),
    ("grpo.max_rollout_turns", "", "rollouts of several turns"),
    ("grpo.val_period", "validation.every"),
    ("grpo.val_at_start", "validation.at_start"),
    ("grpo.max_val_samples", "validation.max_prompts"),
    ("grpo.async_grpo.enabled", "async.enabled"),
    ("loss_fn.reference_policy_kl_penalty", "grpo.loss.kl_coef"),
    ("loss_fn.ratio_clip_min", "grpo.loss.clip_low"),
    ("loss_fn.sequence_level_importance_ratios", "grpo.loss.name", "its true is gspo"),
    ("loss_fn.use_cispo", "grpo.loss.name", "its true is cispo"),
    ("loss_fn.ratio_clip_max", "grpo.loss.clip_high"),
    ("loss_fn.ratio_clip_c", "grpo.loss.dual_clip", "null is off"),
    ("loss_fn.token_level_loss", "grpo.loss.reduction", "its true is token, its false is sequence"),
    ("loss_fn.use_importance_sampling_correction", "grpo.loss.importance_cap", "null is off"),
    ("policy.model_name", "model.path"),
    ("policy.tokenizer.name", "model.tokenizer"),
    ("policy.train_global_batch_size", "grpo.updates_per_step", "how many updates, not how large each is"),
    ("policy.train_micro_batch_size", _MICRO, "in tokens, not in sequences"),
    ("policy.logprob_batch_size", _MICRO, "in tokens, not in sequences"),
    ("policy.max_total_sequence_length", "model.max_length"),
    ("policy.precision", "trainer.dtype"),
    ("policy.optimizer.kwargs.lr", "trainer.optimizer.lr"),
    ("policy.generation.max_new_tokens", "generation.max_new_tokens"),
    ("policy.generation.temperature", "generation.temperature"),
    ("policy.generation.vllm_cfg.async_engine", "", "other engine than vLLM's asynchronous one"),
    ("policy.generation.vllm_cfg.precision", "generation.dtype"),
    ("policy.generation.vllm_cfg.max_model_len", "model.max_length"),
    ("policy.generation.vllm_cfg.tensor_parallel_size", "generation.tensor_parallel_size"),
    ("policy.generation.colocated.enabled", "placement.colocated"),
    ("policy.megatron_cfg.enabled", "trainer.backend", "megatron or fsdp"),
    ("policy.dtensor_cfg.enabled", "trainer.backend", "megatron or fsdp"),
    ("policy.sequence_packing.enabled", _MICRO, "sequences are always packed, up to so many tokens"),
    ("checkpointing.save_period", "checkpoint.every"),
    ("checkpointing.keep_top_k", "checkpoint.keep_best"),
    ("checkpointing.metric_name", "checkpoint.metric", "with a leading - where smaller is better"),
    ("checkpointing.checkpoint_dir", "run.dir and run.name", "the run's folder is dir/name"),
    ("logger.wandb.project", "telemetry.trackers", "[{name: wandb, project: ...}]"),
    ("logger.wandb_enabled", "telemetry.trackers", "[{name: wandb, project: ...}]"),
    ("logger.tensorboard_enabled", "telemetry.trackers", "[{name: tensorboard}]"),
    ("cluster.gpus_per_node", "trainer.num_ranks", "one rank a device, over all nodes"),
    ("cluster.num_nodes", "", "number of nodes in a run: --cluster NAME says where it runs"),
)
FORMERLY = "rlctl"
_FORMER = (
    ("telemetry.wandb_project", "telemetry.trackers", "[{name: wandb, project: ...}]"),
    ("telemetry.tensorboard", "telemetry.trackers", "[{name: tensorboard}]"),
    ("telemetry.rollouts_per_step", "telemetry.groups_per_step", "whole groups, not the first rollout of each"),
    ("async.lookahead", "async.prefetch"),
    ("grpo.skip_uniform_groups", _FILTER, f"rewards, with {_EXTRA} at 0"),
)
_FORMER_VALUES = {("grpo.loss.proximal", "behaviour"): "rollout"}

_TABLES = ((FORMERLY, _FORMER), ("TRL", _TRL), ("verl", _VERL), ("NeMo-RL", _NEMO))
PEER_KEYS = tuple(PeerKey(tool, *row) for tool, rows in _TABLES for row in rows)


def renamed_value(key: str, value: object) -> str:
    """Return `; X is now Y` for a word that rlctl had for a value of `key`; nothing for any other."""
    new = _FORMER_VALUES.get((key, str(value)))
    return f"; {value} is now {new}" if new else ""
