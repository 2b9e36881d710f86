"""The critic before a run starts: its settings, its memory in the forecast, and runs that are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.config.errors import ConfigError
from rlctl.preflight.critic import critic_settings, critic_sizes
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.placement import this_machine
from rlctl.preflight.plan import make_plan
from rlctl.preflight.settled import Settled
from tests.size_formulas import sizes_by_formula
from tests.unit.preflight.teachers import write_teachers

GIB = 1 << 30
PPO = ("grpo.advantage=gae", "critic={}", "grpo.num_generations_per_prompt=1")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = write_teachers(tmp_path)
    monkeypatch.chdir(home)
    return home


def settle(*overrides: str, device: str = "cuda") -> Settled:
    run = load("grpo", "grpo.recipe.yaml", list(overrides)).settled
    return run.settle_on(RunMachine(device, 80 * GIB), run.facts)  # type: ignore[arg-type]


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load("grpo", "grpo.recipe.yaml", list(overrides))
    [only] = [str(problem) for problem in caught.value.problems]
    return only


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["grpo.advantage=gae"], "grpo.advantage.name: needs a critic: set critic={}, or another advantage"),
        (["critic={}"], "critic: nothing reads its values: set grpo.advantage.name=gae, or critic=null"),
        ([*PPO, "critic.num_ranks=2"], "must be at most trainer.num_ranks=1, whose devices they share, not 2"),
        ([*PPO, "critic.updates_per_step=999"], "prompts of a step, not 999"),
        ([*PPO, "critic.warm_up_steps=100000"], "or the policy never learns; not 100000"),
        ([*PPO, "critic.path=nowhere"], "no file or folder nowhere"),
        ([*PPO, "critic.path=empty"], "no file or folder empty"),
        ([*PPO, "critic.optimizer.betas=[0.9]"], "must be two numbers, not 1"),
        (
            [*PPO, "grpo.dynamic_sampling.filter=rewards"],
            "rewards leaves out groups of equal rewards, from which a critic learns: set null or accuracy",
        ),
        ([*PPO, "critic.value_clip=0"], "must be above 0, not 0"),
        ([*PPO, "grpo.advantage.lam=1.5"], "must be at least 0 and at most 1, not 1.5"),
    ],
)
def test_a_wrong_critic_is_refused_in_one_line(home: Path, overrides: list[str], expected: str) -> None:
    assert expected in problem(*overrides).replace(str(home), "HOME")


def test_an_advantage_of_ones_own_that_reads_values_gives_returns(home: Path) -> None:
    head = "from rlctl.grpo.advantages.base import Advantage\n\n\nclass Mine(Advantage):\n    columns = ('value',)\n"
    call = "    def __call__(self, rollouts):\n        return rollouts.reward\n"
    (home / "mine.py").write_text(head + call)
    mine = ("grpo.advantage={name: 'mine.py:Mine'}", "critic={}")
    assert "reads value: define learned_columns too, which gives the critic its returns" in problem(*mine)
    (home / "theirs.py").write_text(head + call + "    def learned_columns(self, rollouts):\n        return {}\n")
    assert settle("grpo.advantage={name: 'theirs.py:Mine'}", "critic={}").grpo


def test_groups_of_one_need_a_critic(home: Path) -> None:
    assert "must be at least 2, not 1" in problem("grpo.num_generations_per_prompt=1")
    assert settle(*PPO).grpo


def test_a_critic_is_the_policys_trainer_with_its_own_optimizer(home: Path) -> None:
    settled = settle(*PPO, "critic.optimizer.lr=3e-4", "lora={}", "trainer.num_ranks=2")
    trainer = critic_settings(settled)
    assert trainer is not None
    assert (trainer.optimizer.lr, trainer.num_ranks, trainer.adapters) == (3e-4, 2, None)
    assert trainer.offload_optimizer_for_generation
    assert settled.trainer.adapters is not None
    assert critic_settings(settle()) is None
    sizes = critic_sizes(settled)
    assert sizes is not None and settled.facts is not None
    assert sizes.head_outputs == 1 and sizes.parameters < settled.facts.parameters + sizes.hidden + 2


def test_values_are_a_column_of_the_critic_and_nothing_is_frozen(home: Path) -> None:
    settled = settle(*PPO)
    assert settled.computed_columns == {"value": "critic"} and settled.frozen_roles == ()
    assert not settle(*PPO, "async.enabled=true").grpo.streams_training  # type: ignore[union-attr]
    with_kl = settle(*PPO, "grpo.advantage.kl_coef=0.01")
    assert with_kl.computed_columns == {"reference_log_prob": "reference", "value": "critic"}
    assert with_kl.frozen_roles == ("reference",)


def test_the_forecast_counts_the_critic_on_each_device(home: Path) -> None:
    settled = settle(*PPO)
    plan = make_plan(settled, this_machine(1))
    without = make_plan(settle("grpo.num_generations_per_prompt=2"), this_machine(1))
    assert plan.memory and without.memory
    sizes = critic_sizes(settled)
    assert sizes is not None
    # At least its float32 weights are on the device while the policy trains.
    assert plan.memory.trainer["critic"] >= 4 * sizes.parameters
    assert plan.memory.peak >= without.memory.peak + 4 * sizes.parameters
    assert "critic: 1 rank on the trainer's GPUs, which both use in turn" in plan.notes
    on_cpu = make_plan(settle(*PPO, device="cpu"), this_machine(0))
    assert on_cpu.memory and on_cpu.memory.trainer["critic: AdamW moments"] == 8 * sizes.parameters


@pytest.mark.parametrize("offload", ["true", "false"])
def test_packs_and_engines_leave_room_for_a_critic_of_4b(home: Path, offload: str) -> None:
    layers = {"hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    further = {"vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": True}
    sizes = sizes_by_formula({"model_type": "qwen3", **layers, **heads, **further})
    settled = settle(*PPO, "data.max_prompt_length=16", f"trainer.offload_optimizer_for_generation={offload}")
    plan = make_plan(settled.settle_on(RunMachine("cuda", 140 * GIB), sizes), this_machine(1))
    assert plan.memory and plan.memory.peak <= 0.9 * 140 * GIB
    without = settle("data.max_prompt_length=16").settle_on(RunMachine("cuda", 140 * GIB), sizes)
    assert settled.settle_on(RunMachine("cuda", 140 * GIB), sizes).trainer.activation_checkpointing
    assert not without.trainer.activation_checkpointing


def test_a_large_critic_is_refused_with_the_arithmetic(home: Path) -> None:
    settled = settle(*PPO)
    assert settled.facts
    huge = replace(settled.facts, parameters=10**10, expert_parameters=0)
    plan = make_plan(settled.settle_on(RunMachine("cuda", 180 * GIB), huge), this_machine(1))
    alone = make_plan(settle().settle_on(RunMachine("cuda", 180 * GIB), huge), this_machine(1))
    assert alone.too_large is None
    assert plan.too_large is not None and "critic" in plan.too_large


def test_a_policy_with_a_value_head_is_refused(home: Path) -> None:
    file = home / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["Qwen3ForTokenClassification"]}))
    assert "has 2 labels; a value head has one" in problem()
    labels = {"id2label": {"0": "LABEL_0"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | labels))
    assert "has a value head (Qwen3ForTokenClassification): it values tokens and predicts none" in problem()
