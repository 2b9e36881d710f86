"""A run with a critic: it learns from groups of one, and a killed run goes on bit for bit, policy and critic."""

import json
from pathlib import Path

import pytest

from tests.faults.runs import WITHOUT_VLLM, Run
from tests.faults.test_resume import check_a_kill_changes_nothing
from tests.system.test_distillation import make_teacher

PPO = (
    "grpo.advantage={name: gae, lam: 0.95}",
    "critic={warm_up_steps: 1, optimizer: {lr: 1.0e-3}}",
    "grpo.num_prompts_per_step=16",
    "grpo.num_generations_per_prompt=1",
)
SAVING = ("grpo.num_steps=4", "checkpoint={every: 1, keep_last: 9}")
# Games of several turns.
GUESS = "guess-tiny"
ASYNC = ("async.enabled=true", "async.max_trajectory_age_steps=2")
TWO_RANKS = ("critic.updates_per_step=2", "trainer.num_ranks=2")


def weights_of(run: Run, step: int, part: str) -> bytes:
    """Return the bytes of the exported policy (hf) or critic (critic_hf)."""
    (file,) = (run.path / f"checkpoints/step_{step}/{part}").glob("*.safetensors")
    return file.read_bytes()


def check_critics(run: Run, steps: int) -> None:
    """Check the records of a run, and that the critic is alone in step 1."""
    records = run.steps()
    assert len(records) == steps and run.undeclared_metrics() == set()
    assert all(record["critic/loss"] > 0 and record["critic/grad_norm"] > 0 for record in records)
    assert records[0]["critic/value"] == 0 and "critic/explained_variance" in records[1]
    assert "train/grad_norm" not in records[0] and records[1]["train/grad_norm"] > 0
    assert all(record["train/skipped_updates"] == 0 for record in records)


def test_a_critic_learns_first_and_both_are_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, "ppo", WITHOUT_VLLM, *PPO, "grpo.num_steps=3", "checkpoint={every: 1, keep_last: 9}")
    assert run.end() == 0, run.text()
    check_critics(run, 3)
    # The policy stays as it was in step 1, and moves then.
    policies = [weights_of(run, step, "hf") for step in (1, 2, 3)]
    critics = [weights_of(run, step, "critic_hf") for step in (1, 2, 3)]
    assert len({*policies}) == 3 and len({*critics}) == 3
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(run.path / "checkpoints/step_3/critic_hf")
    assert model.num_labels == 1 and model.score.weight.abs().max() > 0


@pytest.mark.long  # three runs each
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("async.enabled=true", "async.max_trajectory_age_steps=2"),
        ("critic.updates_per_step=2", "trainer.num_ranks=2"),
    ],
    ids=["synchronous", "asynchronous", "two ranks"],
)
def test_a_killed_run_goes_on_bit_for_bit(settings: tuple[str, ...], tmp_path: Path) -> None:
    if "async.enabled=true" in settings:
        # The moments at which rollouts end decide their steps, so only the last step is checked.
        killed = Run(tmp_path, "killed", WITHOUT_VLLM, *PPO, *SAVING, *settings)
        killed.wait_for_step(2)
        killed.kill()
        resumed = Run(tmp_path, "killed", resume=True)
        assert resumed.end() == 0, resumed.text()
        check_critics(resumed, 4)
        return
    check_a_kill_changes_nothing(tmp_path, (WITHOUT_VLLM, *PPO, *SAVING, *settings), last=4)
    runs = [tmp_path / "runs" / name for name in ("whole", "killed")]
    files = [run / "checkpoints/step_4" / part for run in runs for part in ("critic_hf", "critic")]
    contents = [sorted((file.name, file.read_bytes()) for file in folder.glob("*.safetensors")) for folder in files]
    assert contents[:2] == contents[2:]


@pytest.mark.long  # a run each
@pytest.mark.parametrize(
    "policy",
    [("trainer.backend=fsdp",), ("lora={rank: 4}", "generation.engine=vllm"), ("trainer.backend=megatron",)],
    ids=["whole", "adapters", "megatron"],
)
def test_another_architecture_is_the_critic_of_any_policy(policy: tuple[str, ...], tmp_path: Path) -> None:
    folder = make_teacher(tmp_path / "llama", "llama", hidden_size=64)
    settings = (*policy, f"critic.path={folder}")
    run = Run(tmp_path, "other", WITHOUT_VLLM, *PPO, *settings, "grpo.num_steps=3", "checkpoint.every=1")
    assert run.end() == 0, run.text()
    check_critics(run, 3)
    config = json.loads((run.path / "checkpoints/step_3/critic_hf/config.json").read_text())
    assert config["architectures"] == ["LlamaForTokenClassification"] and config["hidden_size"] == 64


@pytest.mark.long  # a run
def test_values_carry_over_the_turns_of_an_environment(tmp_path: Path) -> None:
    kl = "grpo.advantage={name: gae, lam: 0.9, bootstrap_cut: true, kl_coef: 0.01, kl_estimator: k3}"
    run = Run(tmp_path, "turns", GUESS, WITHOUT_VLLM, *PPO[1:], kl, "grpo.num_steps=3")
    assert run.end() == 0, run.text()
    assert all(record["critic/loss"] > 0 for record in run.steps())


@pytest.mark.long  # a run
def test_a_resume_from_a_checkpoint_without_critic_is_refused_in_a_line(tmp_path: Path) -> None:
    group = ("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=2", "grpo.num_steps=1")
    run = Run(tmp_path, "plain", WITHOUT_VLLM, *group, "checkpoint.every=1")
    assert run.end() == 0, run.text()
    resumed = Run(tmp_path, "plain", "grpo.advantage=gae", "critic={}", "grpo.num_steps=2", resume=True)
    assert resumed.end() != 0
    assert "step_1 has no critic: its run had none; start a new run" in resumed.text()
