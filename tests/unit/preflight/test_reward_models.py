"""A reward model is a role of the run: it has a place, memory and checks, and what it cannot do is refused."""

import json
import shutil
from pathlib import Path

import pytest

from rlctl.config.errors import ConfigError
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.placement import this_machine
from rlctl.preflight.plan import RunPlan, make_plan
from rlctl.preflight.settled import SettledGrpo
from tests.unit import folders

GIB = 1 << 30


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a home with the reward models `judge` and `five`, of five labels, and work in it."""
    home = folders.write(tmp_path / "home")
    for name, labels in {"judge": 1, "five": 5}.items():
        shutil.copytree(home / "model", home / name)
        config = json.loads((home / name / "config.json").read_text())
        config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": labels}
        (home / name / "config.json").write_text(json.dumps(config))
    read_sizes(home / "judge/config.json")
    monkeypatch.chdir(home)
    return home


def settle(*overrides: str) -> SettledGrpo:
    settled: SettledGrpo = load("grpo", "grpo.recipe.yaml", list(overrides)).settled
    return settled


def plan_of(settled: SettledGrpo, gpus: int, memory: int = GIB) -> RunPlan:
    device = "cuda" if gpus else "cpu"
    return make_plan(settled.settle_on(RunMachine(device, memory), settled.facts), this_machine(gpus))


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load("grpo", "grpo.recipe.yaml", list(overrides))
    return [f"{problem.key}: {problem.what}" for problem in caught.value.problems]


def rewards(**keys: object) -> str:
    return f"rewards=[{json.dumps({'name': 'model', 'path': 'judge', **keys})}]"


def test_a_reward_model_is_resident_and_its_memory_is_forecast(home: Path) -> None:
    settled = settle(rewards())
    plan = plan_of(settled, gpus=1)
    assert plan.memory and not plan.unplaced
    states = plan.memory.placed_states
    assert states["log_probs"]["rewards.0"].place == "device"
    assert {states[phase]["rewards.0"].place for phase in states if phase != "log_probs"} == {"host"}
    assert [choice.value for choice in plan.chosen if choice.key == "rewards.0.place"] == ["resident"]
    (problem,) = plan_of(settled, gpus=1, memory=1 << 20).unplaced.values()
    assert "rewards.0.place=engines has GPUs of its own" in problem


def test_a_reward_model_on_engines_has_devices_of_its_own(home: Path) -> None:
    settled = settle(rewards(place="engines", num_engines=2), "placement.colocated=true")
    assert not settled.values_in_ranks and settled.frozen_roles == ("rewards.0",)
    plan = plan_of(settled, gpus=3)
    assert plan.placement and len(plan.placement.scoring) == 2
    assert any(note.startswith("rewards.0 on engines: 2 GPUs of its own") for note in plan.notes)
    lacking = plan_of(settled, gpus=2)
    assert lacking.misplaced and "2 GPUs needed for engines that score with a model" in lacking.misplaced


def test_its_values_come_with_the_step(home: Path) -> None:
    assert settle(rewards(), "async.enabled=true").streams_training is False
    assert settle("rewards=[exact]", "async.enabled=true").streams_training is True
    (problem,) = problems(rewards(), "grpo.dynamic_sampling.filter=rewards")
    assert problem.startswith("grpo.dynamic_sampling.filter: must be null with a reward model")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([rewards(path="model")], "has no value head ("),
        ([rewards(path="five")], "has 5 labels; a value head has one"),
        ([rewards(place="swapped")], "rewards.0.place: must be one of auto, resident, engines, not 'swapped'"),
        ([rewards(timeout_s=3)], "rewards.0.timeout_s: unknown key here: a key of judge; model has name, weight"),
        ([rewards(), "trainer.backend=megatron"], "rewards.0.place: must be engines with trainer.backend=megatron"),
        (['rewards=[{"name": "model"}]'], "rewards.0.path: not set, and has no default: The model"),
        (['rewards=[{"name": "exact", "path": "judge"}]'], "rewards.0.path: unknown key here: a key of judge, model"),
    ],
)
def test_what_a_reward_model_cannot_be_is_refused(home: Path, overrides: list[str], problem: str) -> None:
    found = problems(*overrides)
    assert any(problem in line for line in found), found
