"""Drafts from configs with the keys and forms of verl, NeMo-RL and prime-rl: each value, and each comment."""

from pathlib import Path
from typing import Any

import pytest

from rlctl.config.errors import ConfigError
from rlctl.config.fields import alternatives, literals, schema_keys
from rlctl.config.import_peer import KeyOutcome, RecipeDraft, draft_recipe
from rlctl.config.peer_keys import peer_keys, same_name_keys
from rlctl.config.plugins import ADVANTAGES, LOSSES
from rlctl.config.provenance import leaves, read_file
from rlctl.config.schema import KINDS
from rlctl.preflight.load import problems_of_text

PEER_FILES = Path(__file__).with_name("peer_files")
CLASSES = {"grpo.loss.name": list(LOSSES), "grpo.advantage.name": list(ADVANTAGES)}
FIELDS: dict[str, Any] = {}
for config_class in KINDS.values():
    FIELDS.update(schema_keys(config_class))

VERL = {
    "run.name": "first",
    "model.path": "Qwen/Qwen2.5-3B-Instruct",
    "data.train.path": "gsm8k/train.parquet",
    "data.train.prompt_key": "prompt",
    "data.train.answer_key": "reward_model.ground_truth",
    "data.validation.path": "gsm8k/test.parquet",
    "data.validation.prompt_key": "prompt",
    "data.validation.answer_key": "reward_model.ground_truth",
    "data.max_prompt_length": 512,
    "rewards": "???",
    "grpo.num_steps": 300,
    "grpo.num_prompts_per_step": 256,
    "grpo.num_generations_per_prompt": 8,
    "grpo.updates_per_step": 4,
    "grpo.advantage.name": "group_mean",
    "grpo.advantage.normalize_std": False,
    # The switch wins over the number.
    "grpo.loss.kl_coef": 0.0,
    "grpo.loss.kl_estimator": "k3",
    # One bound of two, and the other by itself.
    "grpo.loss.clip_low": 0.2,
    "grpo.loss.clip_high": 0.28,
    "grpo.loss.reduction": "token",
    # A rank of 0 is no adapter, whatever its alpha.
    "lora": None,
    "trainer.backend": "fsdp",
    "trainer.num_ranks": 16,
    "trainer.activation_checkpointing": True,
    "trainer.optimizer.lr": 1e-6,
    "trainer.optimizer.weight_decay": 0.01,
    "generation.tensor_parallel_size": 2,
    "generation.max_new_tokens": 1024,
    "generation.temperature": 1.0,
    "generation.top_k": 0,
    "generation.gpu_memory_utilization": 0.6,
    "placement.colocated": True,
    "validation.every": 5,
    "checkpoint.every": 0,
    "telemetry.trackers.0.name": "wandb",
    "telemetry.trackers.0.project": "sums",
}
NEMO_RL = {
    "run.name": "first",
    "model.path": "Qwen/Qwen2.5-1.5B",
    "model.tokenizer": "Qwen/Qwen2.5-1.5B",
    "model.max_length": 4096,
    "data.train.path": "???",
    "rewards": "???",
    "grpo.num_steps": 1000,
    "grpo.num_prompts_per_step": 64,
    "grpo.num_generations_per_prompt": 16,
    "grpo.updates_per_step": 2,
    "grpo.dynamic_sampling.filter": "rewards",
    "grpo.advantage.name": "leave_one_out",
    "grpo.advantage.normalize_std": True,
    "grpo.loss.kl_coef": 0.01,
    "grpo.loss.kl_estimator": "k3",
    "grpo.loss.clip_low": 0.2,
    "grpo.loss.clip_high": 0.28,
    "grpo.loss.reduction": "token",
    "async.enabled": False,
    "trainer.backend": "fsdp",
    "trainer.num_ranks": 8,
    "generation.max_new_tokens": 4096,
    "generation.temperature": 0.9,
    "generation.top_k": 0,
    "validation.temperature": 0.9,
    "telemetry.trackers.0.name": "wandb",
    "telemetry.trackers.0.project": "sums",
    "telemetry.trackers.1.name": "tensorboard",
}
PRIME_RL = {
    "run.name": "first",
    "model.path": "Qwen/Qwen3-1.7B",
    "model.max_length": 8192,
    "data.train.path": "???",
    "rewards": "???",
    "grpo.num_steps": 200,
    "grpo.num_prompts_per_step": 8,
    "grpo.num_generations_per_prompt": 16,
    "async.enabled": True,
    "async.max_trajectory_age_steps": 4,
    "trainer.num_ranks": 2,
    "trainer.activation_checkpointing": True,
    "trainer.optimizer.lr": 3e-6,
    "trainer.optimizer.betas.0": 0.9,
    "trainer.optimizer.betas.1": 0.95,
    "generation.num_engines": 2,
    "generation.tensor_parallel_size": 2,
    "generation.max_new_tokens": 1024,
    "checkpoint.every": 50,
    "telemetry.trackers.0.name": "wandb",
    "telemetry.trackers.0.project": "words",
}
# Keys that are wrong on this machine: files of data and a tracker that it lacks. NeMo-RL lets an answer be as long as
# prompt and answer together; rlctl does not.
FURTHER_PROBLEMS = {
    "verl.yaml": {"data.train.path", "data.validation.path", "telemetry.trackers.0.name"},
    "nemo_rl.yaml": {"generation.max_new_tokens", "telemetry.trackers.0.name"},
    "prime_rl.toml": {"telemetry.trackers.0.name"},
}
DRAFTS = {"verl.yaml": VERL, "nemo_rl.yaml": NEMO_RL, "prime_rl.toml": PRIME_RL}


def values_of(draft: RecipeDraft, folder: Path) -> dict[str, object]:
    """Return the values of a draft by their keys, as rlctl reads them."""
    file = folder / "draft.yaml"
    file.write_text(draft.text)
    values = {key: node.value for key, node in leaves(read_file(file))}
    assert values.pop("defaults") == f"{draft.kind}.yaml"
    return values


def draft_text(folder: Path, text: str, name: str = "theirs.yaml") -> RecipeDraft:
    (folder / name).write_text(text)
    return draft_recipe(folder / name)


@pytest.mark.parametrize("name", DRAFTS)
def test_the_draft_has_the_values_that_mean_the_same(tmp_path: Path, name: str) -> None:
    assert values_of(draft_recipe(PEER_FILES / name), tmp_path) == DRAFTS[name]


@pytest.mark.parametrize("name", DRAFTS)
def test_each_key_is_in_the_draft_translated_or_in_a_comment(name: str) -> None:
    draft = draft_recipe(PEER_FILES / name)
    comments = [line for line in draft.text.splitlines() if line.startswith("# - ")]
    for key in draft.keys:
        if key.outcome is KeyOutcome.TRANSLATED:
            assert f"# {key.key}" in draft.text or f", {key.key}" in draft.text, key.key
        else:
            assert any(key.key in line and key.reason in line for line in comments), key.key


def test_comments_say_why_and_where(tmp_path: Path) -> None:
    text = draft_recipe(PEER_FILES / "verl.yaml").text
    to_do, _, others = text.partition("# Left out, and why.")
    assert "# - defaults: ppo_trainer is not beside verl.yaml: its values are not here" in to_do
    assert "rewards: ???  # TODO: a list" in to_do
    assert "critic.optim.lr = 1e-05: critic.optimizer.lr: with grpo.advantage.name=gae" in others
    assert "kl_loss_coef = 0.001: grpo.loss.kl_coef: actor_rollout_ref.actor.use_kl_loss decides it" in others
    assert "verl.yaml:12 data.return_raw_chat = true: no counterpart" in others
    text = draft_recipe(PEER_FILES / "nemo_rl.yaml").text
    assert "policy.dtensor_cfg.tensor_parallel_size = 4: trainer.megatron.tensor_model_parallel_size: with" in text
    assert "policy.megatron_cfg.enabled is false there" in text
    assert 'nemo_rl.yaml:9 data.train.dataset_name = "OpenMathInstruct-2": data.train.path: a hub data set' in text


@pytest.mark.parametrize("name", DRAFTS)
def test_only_the_keys_that_a_draft_asks_for_are_wrong_in_it(name: str) -> None:
    problems = problems_of_text(draft_recipe(PEER_FILES / name).text)
    asked_keys = {key for key, value in DRAFTS[name].items() if value == "???"}
    assert {problem.key for problem in problems} >= asked_keys
    assert {problem.key for problem in problems} <= asked_keys | FURTHER_PROBLEMS[name], problems


def test_a_config_of_sft_becomes_a_recipe_of_sft(tmp_path: Path) -> None:
    text = '[model]\nname = "m"\n[data]\nname = "chats"\nseq_len = 4096\nbatch_size = 32\n[optim]\nlr = 2e-5\n'
    draft = draft_text(tmp_path, f"max_steps = 7\n{text}", "sft.toml")
    assert (draft.tool, draft.kind) == ("prime-rl", "sft")
    assert values_of(draft, tmp_path) == {
        "model.path": "m",
        "model.max_length": 4096,
        "data.train.path": "chats",
        "sft.num_steps": 7,
        "sft.batch_size": 32,
        "trainer.optimizer.lr": 2e-5,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("actor_rollout_ref: {actor: {ppo_mini_batch_size: 24}}\ndata: {train_batch_size: 64}",
         "grpo.updates_per_step: 2.6666666666666665 is no whole number"),
        ("actor_rollout_ref: {actor: {ppo_mini_batch_size: 24}}",
         "grpo.updates_per_step: needs data.train_batch_size, which is not in the file"),
        ("actor_rollout_ref: {actor: {ppo_mini_batch_size: 0}}\ndata: {train_batch_size: 64}",
         "grpo.updates_per_step: 64 / 0 is no number"),
        ("algorithm: {adv_estimator: gpg}", "grpo.advantage.name: its grpo is group_mean"),
        ("policy: {model_name: '${a.b}'}",
         "model.path: ${a.b} is a reference that the file alone does not fill in"),
        ("policy: {model_name: '${policy.model_name}'}", "model.path: ${policy.model_name} refers to itself"),
        ("orchestrator: {batch_size: many}", "value / orchestrator.group_size|1: many is no number"),
        ("policy: {max_total_sequence_length: 5, generation: {vllm_cfg: {max_model_len: 6}}}",
         "model.max_length: policy.max_total_sequence_length says otherwise, and is taken"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_told_is_asked_for(tmp_path: Path, text: str, expected: str) -> None:
    draft = draft_text(tmp_path, text)
    to_do = [key.comment() for key in draft.keys if key.outcome is KeyOutcome.TO_DO]
    assert len(to_do) == 1
    assert expected in to_do[0]
    assert to_do[0] in draft.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("defaults: grpo.yaml\ngrpo: {num_prompts_per_step: 3}\n", "grpo.yaml is rlctl's: this is a recipe already"),
        ("a: 1\n", "has no key of verl, NeMo-RL, prime-rl that rlctl knows"),
        ("- 1\n", "a config is a mapping of `key: value` lines"),
    ],
)
def test_a_file_that_is_none_of_theirs_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        draft_text(tmp_path, text)
    assert len(caught.value.problems) == 1
    assert expected in str(caught.value)


def results_of(rule: Any, keys: list[str]) -> list[tuple[str, object]]:
    """Return (key of rlctl, value) for every result that a rule may have, formulas left out."""
    if isinstance(rule, dict):
        inner = []
        for name, result in rule.items():
            is_key = "." in str(name) and name in FIELDS
            inner += results_of(result, [name] if is_key or name == "lora" else keys)
        return inner
    return [] if isinstance(rule, str) and rule.startswith("= ") else [(key, rule) for key in keys]


def test_the_results_of_rules_are_values_that_their_keys_take() -> None:
    for peer in (*peer_keys(), *same_name_keys()):
        for key, value in results_of(peer.rule, peer.rlctl_keys) if peer.rule is not None else []:
            hint = FIELDS[key].type
            words = CLASSES.get(key, literals(hint))
            if isinstance(value, str):
                assert value in words or (key not in CLASSES and str in alternatives(hint)), (peer, value)
            elif not isinstance(value, list):
                assert type(value) in alternatives(hint) or key == "lora", (peer, value)
