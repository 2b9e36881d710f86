"""The answer to a key of another tool, or in the wrong place."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.config.convert import known_keys
from rlctl.config.errors import ConfigError
from rlctl.config.fields import alternatives, literals, schema_keys
from rlctl.config.peer_keys import peer_keys, same_name_keys
from rlctl.config.schema import KINDS
from rlctl.preflight.load import load
from tests.unit.folders import GRPO

FIELDS: dict[str, Any] = {}
for config_class in KINDS.values():
    FIELDS.update(schema_keys(config_class))
RLCTL_KEYS = set(FIELDS)
# Tool -> its key -> the kind of its default, and where the name alone leads.
PEER_CONFIGS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("peer_configs.yaml").read_text())

EXPERTS = "expert parallel generation: generation.tensor_parallel_size cuts every expert over the GPUs of an engine"
PIPELINE = (
    "pipeline parallel generation: an engine is on one node, cut over its GPUs by generation.tensor_parallel_size"
)


def collect_problems(overrides: list[str], recipe: str = "grpo.recipe.yaml") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load("grpo", recipe, overrides)
    return [str(problem) for problem in caught.value.problems]


def split_keys(rlctl_key: str) -> list[str]:
    """Return the keys of rlctl that a row names."""
    return [word for word in re.findall(r"[\w.]+", rlctl_key) if word not in ("and", "or")]


def test_every_key_of_another_tool_is_answered_with_one_of_ours_that_there_is() -> None:
    keys = known_keys(KINDS["grpo"])
    for peer in peer_keys():
        remark = keys.remark(peer.key, [])
        rlctl_keys = split_keys(peer.rlctl_key)
        assert set(rlctl_keys) <= RLCTL_KEYS and (peer.rlctl_key or peer.note) and peer.key not in RLCTL_KEYS
        if not peer.rlctl_key:
            assert remark == f"; rlctl has no {peer.note}"
        else:
            assert any(key in remark for key in rlctl_keys), remark
            assert peer.note in remark or "did you mean" in remark, remark


def list_kinds(field: Any) -> set[str]:
    """Return the kinds of defaults, in the words of peer_configs.yaml, that a key of rlctl may have."""
    kind_by_type = {str: "text", bool: "bool", int: "int", float: "float"}
    kinds = {kind_by_type.get(alternative, "list") for alternative in alternatives(field.type)}
    if literals(field.type):
        kinds.add("text")
    if kinds & {"int", "float"}:
        kinds |= {"int", "float"}
    return kinds


def test_a_row_says_where_its_peers_key_has_another_kind_of_value() -> None:
    """A switch is no number, and a list no text: without a note, the peer's value could be copied."""
    for peer in peer_keys():
        peer_kinds = {
            default.split(" -> ")[0]
            for key, default in PEER_CONFIGS.get(peer.tool, {}).items()
            if f".{key}".endswith(f".{peer.key}")
        }
        if peer.note or not peer_kinds - {"any", "unset", "section"}:
            continue
        for key in split_keys(peer.rlctl_key):
            rlctl_kinds = list_kinds(FIELDS[key])
            assert peer_kinds & {*rlctl_kinds, "any", "unset"}, (peer, peer_kinds, rlctl_kinds)


@pytest.mark.parametrize("tool", ["verl", "NeMo-RL", "TRL"])
def test_each_row_is_of_a_key_that_its_tool_has(tool: str) -> None:
    # From scripts, recipes and arguments of trainers beside the configs that are listed.
    elsewhere = {"dataset_name", "reward_funcs", "peft_config", "policy.dtensor_cfg.expert_parallel_size"}
    elsewhere |= {f"algorithm.filter_groups.{name}" for name in ("metric", "enable", "max_num_gen_batches")}
    keys = [f".{key}." for key in PEER_CONFIGS[tool]]
    rows = [peer.key for peer in peer_keys() if peer.tool == tool and peer.key not in elsewhere]
    assert [row for row in rows if not any(f".{row}." in key for key in keys)] == []


@pytest.mark.parametrize("tool", PEER_CONFIGS)
def test_a_key_of_a_peers_own_config_is_answered_by_a_row_or_rightly_or_not_at_all(tool: str) -> None:
    """A wrong answer is worse than none. A name that leads to a key of rlctl by itself was looked at, one by one."""
    keys = known_keys(KINDS["grpo"])
    for key, default in PEER_CONFIGS[tool].items():
        answer = keys.remark(key, [])
        expected_guess = default.partition(" -> ")[2]
        is_row = re.search("; (rlctl has no|[\\w-]+'s [\\w.]+ is) ", answer)
        is_none = re.search("^; [\\w. ]+ has $", answer)
        guess = ""
        if not (is_row or is_none):
            guess = " or ".join(re.findall(r"\w+(?:\.\w+)+", answer))
        assert guess == expected_guess, f"{key}{answer}"


@pytest.mark.parametrize("tool", PEER_CONFIGS)
def test_a_name_that_leads_to_a_key_by_itself_has_a_row_among_the_same_names(tool: str) -> None:
    rows = [peer for peer in same_name_keys() if peer.tool == tool]
    assert {key for row in rows for key in row.rlctl_keys} <= RLCTL_KEYS
    for key, default in PEER_CONFIGS[tool].items():
        guess = default.partition(" -> ")[2]
        if guess:
            [row] = [row for row in rows if f".{key}".endswith(f".{row.key}")]
            assert set(row.rlctl_keys) & set(guess.split(" or ")), key


def test_a_former_word_for_a_value_is_answered_with_the_new_one(home: Path) -> None:
    [problem] = collect_problems(["grpo.loss.proximal=behaviour"])
    assert problem.endswith("must be one of auto, rollout, recompute, not 'behaviour'; behaviour is now rollout")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        # Former names of rlctl.
        ("telemetry.wandb_project=a", "telemetry.wandb_project is now telemetry.trackers: [{name: wandb, project: "
         "...}]"),
        ("telemetry.tensorboard=true", "telemetry.tensorboard is now telemetry.trackers: [{name: tensorboard}]"),
        ("async.lookahead=full", "async.lookahead is now async.prefetch"),
        (
            "grpo.skip_uniform_groups=true",
            "grpo.skip_uniform_groups is now grpo.dynamic_sampling.filter: rewards, with "
            "grpo.dynamic_sampling.max_extra at 0",
        ),
        ("algorithm.filter_groups.metric=acc", "verl's algorithm.filter_groups.metric is "
         "grpo.dynamic_sampling.filter: its acc is accuracy, its score and seq_reward are rewards; null is off"),
        ("reward_model.overlong_buffer.len=4096", "rlctl has no reward model: a reward is a function, which may call "
         "one; its overlong_buffer is grpo.overlong"),
        ("mask_truncated_completions=true", "TRL's mask_truncated_completions is grpo.overlong.mask"),
        ("grpo.use_dynamic_sampling=true", "NeMo-RL's grpo.use_dynamic_sampling is grpo.dynamic_sampling.filter: "
         "rewards is its true"),
        ("seq_len=4096", "prime-rl's seq_len is model.max_length"),
        ("max_async_level=2", "prime-rl's max_async_level is async.max_trajectory_age_steps: with async.enabled=true; "
         "0 is async.enabled=false"),
        ("rollouts_per_example=16", "prime-rl's rollouts_per_example is grpo.num_generations_per_prompt"),
        ("orchestrator.group_size=16", "prime-rl's group_size is grpo.num_generations_per_prompt"),
        ("optim.lr=1e-6", "prime-rl's optim.lr is trainer.optimizer.lr"),
        ("ckpt={}", "prime-rl's ckpt is checkpoint"),
        ("wandb.project=x", "prime-rl's wandb.project is telemetry.trackers: [{name: wandb, project: ...}]"),
        # Engines over several nodes, and engines of experts: the reason and the remedy in one line.
        ("generation.expert_parallel_size=8", f"rlctl has no {EXPERTS}"),
        ("generation.engine.enable_expert_parallel=true", f"rlctl has no {EXPERTS}"),
        ("actor_rollout_ref.rollout.expert_parallel_size=8", f"rlctl has no {EXPERTS}"),
        ("generation.vllm_cfg.expert_parallel_size=8", f"rlctl has no {EXPERTS}"),
        ("generation.pipeline_parallel_size=2", f"rlctl has no {PIPELINE}"),
        ("generation.engine.pipeline_parallel_size=2", f"rlctl has no {PIPELINE}"),
        ("rollout.pipeline_model_parallel_size=2", f"rlctl has no {PIPELINE}"),
        ("trainer.megatron.pipeline_parallel_size=2", "did you mean pipeline_model_parallel_size?"),
        ("trainer.megatron.expert_parallel_size=2", "did you mean expert_model_parallel_size?"),
        # A hint of another section's key with the same name would mislead.
        ("checkpointing.enabled=true", "NeMo-RL's checkpointing.enabled is checkpoint.every: 0 is its false"),
        ("policy.dtensor_cfg.tensor_parallel_size=2", "NeMo-RL's policy.dtensor_cfg.tensor_parallel_size is "
         "trainer.megatron.tensor_model_parallel_size: with trainer.backend=megatron; fsdp shards over all ranks"),
        ("policy.generation.backend=vllm", "NeMo-RL's policy.generation.backend is generation.engine.name"),
        ("grpo.max_rollout_turns=4", "NeMo-RL's grpo.max_rollout_turns is environment.max_turns"),
        ("logger.log_dir=x", "NeMo-RL's logger.log_dir is run.dir: a run's logs are in dir/name/logs"),
        ("algorithm.filter_groups.enable=true", "verl's algorithm.filter_groups.enable is "
         "grpo.dynamic_sampling.filter: rewards or accuracy; null is its false"),
        ("data.truncation=error", "rlctl has no truncation: prompts above data.max_prompt_length, and samples above "
         "model.max_length, are left out and counted"),
        ("data.train_files=[a]", "verl's data.train_files is data.train.path: a file or a list of files"),
        ("trainer.critic_warmup=0", "verl's trainer.critic_warmup is critic.warm_up_steps: with "
         "grpo.advantage.name=gae"),
        ("actor_rollout_ref.model.use_remove_padding=true", "verl's actor_rollout_ref.model.use_remove_padding is "
         "trainer.micro_batch_tokens: always: sequences are packed, none is padded"),
        ("eval_strategy=steps", "TRL's eval_strategy is validation.every: a number of steps; 0 is its no"),
        ("reward_funcs=x.py", "TRL's reward_funcs is rewards: a list of {name: file.py:function}"),
        # In any section, and by the end of its path.
        ("beta=0.04", "TRL's beta is grpo.loss.kl_coef"),
        ("grpo.loss.epsilon_high=0.28", "TRL's epsilon_high is grpo.loss.clip_high"),
        ("rollout.n=8", "verl's actor_rollout_ref.rollout.n is grpo.num_generations_per_prompt"),
        ("grpo.loss_type=dapo", "TRL's loss_type is grpo.loss.name: its dapo is grpo, its grpo has reduction "
         "sequence; dr_grpo and cispo too"),
        ("lora.r=8", "PEFT's lora.r is lora.rank"),
        ("enable_lora=true", "vLLM's enable_lora is lora: {} is the defaults, null is off"),
        ("model.lora_rank=8", "verl's actor_rollout_ref.model.lora_rank is lora.rank: lora: null is its 0"),
        ("trainer.model.lora.rank=3", "did you mean lora.rank?"),
        ("model.peft_config.r=8", "PEFT's peft_config.r is lora.rank"),
        ("trainer.lora_target_modules=[q_proj]", "TRL's lora_target_modules is lora.targets: a list of names; its "
         "all-linear is all"),
        ("lora.use_dora=true", "rlctl has no DoRA: a column norm is no part of the product that engines add"),
        ("lora.modules_to_save=[lm_head]", "rlctl has no fully trained parts beside adapters: engines serve adapters "
         "of linear layers alone"),
        # A name of the section itself in another form comes before another tool's.
        ("trainer.optimizer.beta=0.9", "did you mean betas?"),
        ("trainer.optimizer.epsilon=1e-8", "did you mean eps?"),
        ("grpo.num_generations=8", "did you mean num_generations_per_prompt?"),
        # This kind of run comes before others; a key of another kind is answered with its equal here.
        ("batch_size=3", "sft.batch_size is of another kind of run; this one has grpo.num_prompts_per_step"),
        ("sft.batch_size=3", "sft is of another kind of run"),
        ("max_loss_rise=3", "health.max_loss_rise is of another kind of run"),
        ("num_steps=3", "it belongs at grpo.num_steps"),
        ("max_steps=3", "TRL's max_steps is grpo.num_steps"),
        # The nearest by the whole path and the last word.
        ("generator.temperature=1", "did you mean generation.temperature?"),
        ("genration.max_new_token=3", "did you mean generation.max_new_tokens?"),
        ("grpo.kl_coef=0.1", "did you mean grpo.loss.kl_coef?"),
        ("vllm.gpu_memory_utilization=0.5", "it belongs at generation.gpu_memory_utilization"),
        ("rewards.0.function=x", "rewards.0 has name, weight, correct_at, pattern, timeout_s, concurrency"),
    ],
)  # fmt: skip
def test_words_of_others_and_misplaced_ones_are_answered(home: Path, override: str, expected: str) -> None:
    [problem] = collect_problems([override])
    assert problem.endswith(f"unknown key; {expected}")


def test_a_section_of_another_tool_is_answered_key_by_key_with_file_and_line(home: Path) -> None:
    actor = "actor_rollout_ref:\n  rollout: {n: 8, free_cache_engine: true}\n  actor:\n    optim: {lr: 1e-6}\n"
    (home / "x.yaml").write_text(GRPO + actor + "critic:\n  optim: {lr: 1e-5}\n")
    first_line = GRPO.count("\n") + 1
    assert collect_problems([], "x.yaml") == [
        f"x.yaml:{first_line + 1}: actor_rollout_ref.rollout.n: unknown key; "
        "verl's actor_rollout_ref.rollout.n is grpo.num_generations_per_prompt",
        f"x.yaml:{first_line + 3}: actor_rollout_ref.actor.optim.lr: unknown key; "
        "verl's actor_rollout_ref.actor.optim.lr is trainer.optimizer.lr",
        f"x.yaml:{first_line}: actor_rollout_ref: unknown section; rlctl has nothing for rollout.free_cache_engine",
        f"x.yaml:{first_line + 5}: critic.optim.lr: unknown key; "
        "verl's critic.optim.lr is critic.optimizer.lr: with grpo.advantage.name=gae",
        "configs/critic.yaml:3: critic: nothing reads its values: set grpo.advantage.name=gae, or critic=null",
    ]


def test_a_huge_section_that_nobody_knows_takes_no_time(home: Path) -> None:
    (home / "x.yaml").write_text(GRPO + "grpoo:\n" + "".join(f"  num_stepss{i}: 1\n" for i in range(2000)))
    start = time.process_time()
    problems = collect_problems([], "x.yaml")
    assert time.process_time() - start < 60
    assert len(problems) == 501
    assert problems[-1].endswith("grpoo: unknown section; only its first 500 keys were looked at")


def test_a_file_of_another_tool_is_answered_key_by_key_though_it_has_no_kind(home: Path) -> None:
    (home / "trl.yaml").write_text("beta: 0.0\nmax_steps: 5\n")
    assert collect_problems([], "trl.yaml") == [
        "trl.yaml: kind: must be one of grpo, sft: inherit it, `defaults: grpo.yaml` or `defaults: sft.yaml`",
        "trl.yaml:1: beta: unknown key; TRL's beta is grpo.loss.kl_coef",
        "trl.yaml:2: max_steps: unknown key; TRL's max_steps is grpo.num_steps",
    ]


PRIME_RL = """\
seq_len = 8192

[model]
name = "Qwen/Qwen3-0.6B"

[orchestrator]
batch_size = 128

[[orchestrator.train.source]]
name = "wordle"
[orchestrator.train.source.env.taskset]
id = "wordle"

[[orchestrator.eval.source]]
name = "wordle"

[trainer.model.ac]
freq = 1

[trainer]
heartbeat = { url = "x" }
"""


def test_a_toml_file_of_prime_rl_is_answered_with_its_lines(home: Path) -> None:
    (home / "rl.toml").write_text(PRIME_RL)
    first_problem, *key_problems = collect_problems([], "rl.toml")
    assert first_problem.startswith("rl.toml: is TOML; a config is YAML and inherits its kind")
    *key_problems, last_problem = sorted(key_problems, key=lambda problem: int(problem.split(":")[1]))
    assert last_problem.startswith("rl.toml:21: trainer.heartbeat: unknown key; trainer has backend")
    assert key_problems == [
        "rl.toml:1: seq_len: unknown key; prime-rl's seq_len is model.max_length",
        "rl.toml:4: model.name: unknown key; prime-rl's model.name is model.path",
        "rl.toml:7: orchestrator.batch_size: unknown key; prime-rl's orchestrator.batch_size is "
        "grpo.num_prompts_per_step: its number divided by its group_size",
        "rl.toml:9: orchestrator.train.source: unknown key; prime-rl's orchestrator.train.source is environment: "
        "{name: my_env.py:Class}, and several as environment.choices",
        "rl.toml:14: orchestrator.eval.source: unknown key; prime-rl's orchestrator.eval.source is "
        "data.validation.path: rows, played in the run's environments",
        "rl.toml:17: trainer.model.ac: unknown key; prime-rl's model.ac is trainer.activation_checkpointing",
    ]


def test_a_toml_file_that_is_none_is_one_line(home: Path) -> None:
    (home / "x.toml").write_text("a = = 1\n")
    [problem] = collect_problems([], "x.toml")
    assert problem.startswith("x.toml: not TOML: Invalid value (at line 1")


def test_the_keys_of_a_section_that_lead_nowhere_are_all_named(home: Path) -> None:
    names = [f"key_{number:03}" for number in range(100)]
    unknown_keys = "".join(f"  {name}: 1\n" for name in names)
    (home / "x.yaml").write_text(GRPO + "actor_rollout_ref:\n  actor: {grad_clip: 1}\n" + unknown_keys)
    name_lists = [problem.split("rlctl has nothing for ")[1] for problem in collect_problems([], "x.yaml")[1:]]
    assert ", ".join(name_lists).split(", ") == names
