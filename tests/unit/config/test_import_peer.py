"""A config of another tool becomes the draft of a recipe; the page on coming from such tools is generated."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.config.coming_from import coming_from_page
from rlctl.config.errors import ConfigError
from rlctl.config.import_peer import KeyOutcome, RecipeDraft, draft_recipe
from rlctl.preflight.load import load

ROOT = Path(__file__).parents[3]
NEMO_RL = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 1000, seed: 42, val_period: 10}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.28}
policy:
  model_name: tiny/model
  train_global_batch_size: 256
  max_total_sequence_length: 512
  optimizer: {kwargs: {lr: 5.0e-6, betas: [0.9, 0.95]}}
  generation: {backend: vllm, max_new_tokens: 256, temperature: 0.8, top_k: null}
logger: {wandb_enabled: false, tensorboard_enabled: true, log_dir: logs}
cluster: {gpus_per_node: 4, num_nodes: 2}
a_key_of_nobody: 3
"""
VERL = """
data: {train_files: train.parquet, train_batch_size: 64, max_prompt_length: 512, max_response_length: 1024}
actor_rollout_ref:
  model: {path: tiny/model, enable_gradient_checkpointing: true}
  actor:
    optim: {lr: 1.0e-6}
    ppo_mini_batch_size: 16
    kl_loss_coef: 0.001
  rollout: {n: 8, temperature: 1.0, gpu_memory_utilization: 0.5}
critic: {optim: {lr: 1.0e-5}}
trainer: {total_epochs: 3, save_freq: 20, test_freq: 5, n_gpus_per_node: 8, nnodes: 1}
"""
PRIME_RL = """
max_steps = 500
seq_len = 2048

[model]
name = "tiny/model"

[orchestrator]
batch_size = 512
rollouts_per_example = 16

[orchestrator.sampling]
max_tokens = 1024

[trainer.optim]
lr = 3e-6
"""


def draft(folder: Path, text: str, name: str = "theirs.yaml") -> RecipeDraft:
    (folder / name).write_text(text)
    return draft_recipe(folder / name)


def complete(text: str) -> str:
    """Return a draft with the values that it asks for."""
    text = text.replace("path: ???", "path: train.jsonl").replace("rewards: ???", "rewards: [exact]")
    return "\n".join(line for line in text.splitlines() if "model_name" not in line)


def test_values_are_translated_and_each_other_line_says_why_it_is_not(tmp_path: Path) -> None:
    nemo = draft(tmp_path, NEMO_RL)
    lines = nemo.text.splitlines()
    assert (nemo.tool, nemo.kind) == ("NeMo-RL", "grpo")
    assert "  num_prompts_per_step: 32  # grpo.num_prompts_per_step" in lines
    assert "    clip_high: 0.28  # loss_fn.ratio_clip_max" in lines
    assert "    lr: 5.0e-06  # policy.optimizer.kwargs.lr" in lines
    assert '  trackers: [{"name": "tensorboard"}]  # logger.tensorboard_enabled' in lines
    # 32 prompts x 16 answers in updates of 256; 2 nodes x 4 GPUs.
    assert any(line.startswith("  updates_per_step: 2  # policy.train_global_batch_size") for line in lines)
    assert any(line.startswith("  num_ranks: 8  # cluster.gpus_per_node") for line in lines)
    assert "  top_k: 0  # policy.generation.top_k" in lines
    assert any(line.startswith("    path: ???  # TODO: ") for line in lines)
    assert "# - theirs.yaml:12 a_key_of_nobody = 3: no counterpart" in lines
    assert any("logger.log_dir" in line and line.startswith("# - ") for line in lines)
    assert nemo.count(KeyOutcome.UNKNOWN) == 1


@pytest.mark.parametrize(
    ("text", "name", "tool"),
    [(NEMO_RL, "a.yaml", "NeMo-RL"), (VERL, "b.yaml", "verl"), (PRIME_RL, "c.toml", "prime-rl")],
)
def test_a_draft_has_no_key_that_rlctl_does_not_know(tmp_path: Path, text: str, name: str, tool: str) -> None:
    recipe = draft(tmp_path, text, name)
    assert recipe.tool == tool
    assert recipe.count(KeyOutcome.TRANSLATED) > recipe.count(KeyOutcome.UNKNOWN)
    (tmp_path / "drafted.yaml").write_text(complete(recipe.text))
    try:
        load(None, str(tmp_path / "drafted.yaml"), [])
    except ConfigError as error:
        assert not [problem for problem in error.problems if "unknown" in problem.what], error
        assert not [problem for problem in error.problems if "must be a" in problem.what], error


def test_a_part_that_rlctl_lacks_is_named(tmp_path: Path) -> None:
    text = draft(tmp_path, VERL + "reward_manager: {name: dapo}\n").text
    assert "rlctl has no " in "\n".join(line for line in text.splitlines() if "reward_manager" in line)


def test_a_recipe_of_rlctl_and_a_file_of_no_tool_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grpo\.yaml is rlctl's: this is a recipe already"):
        draft(tmp_path, "defaults: grpo.yaml\n")
    with pytest.raises(ConfigError, match="has no key of verl, NeMo-RL, prime-rl that rlctl knows"):
        draft(tmp_path, "colour: blue\n")


def test_the_command_writes_the_draft_and_says_what_is_to_be_mended(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(NEMO_RL)
    command = [sys.executable, "-m", "rlctl", "config", "import", "theirs.yaml", "-o", "mine.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mine.yaml: NeMo-RL, grpo: " in done.stdout
    assert "note: to be mended: mine.yaml: rewards: not set" in done.stderr
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 2 and "mine.yaml: exists; name another file" in again.stderr


def test_the_page_for_those_who_come_from_other_tools_is_generated() -> None:
    assert (ROOT / "configs/COMING_FROM.md").read_text(encoding="utf-8") == coming_from_page()
