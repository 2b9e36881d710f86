"""Before a run, a reward model's tokenizer is tried without its weights; commands without a place for one say so."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlctl
from rlctl.config.errors import ConfigError
from rlctl.evaluation.store import EvaluationError, refuse_reward_models
from rlctl.preflight.load import load
from tests.unit import folders


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a home with the reward model `judge`, and work in it."""
    home = folders.write(tmp_path / "home")
    shutil.copytree(home / "model", home / "judge")
    config = json.loads((home / "judge/config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    (home / "judge/config.json").write_text(json.dumps(config))
    monkeypatch.chdir(home)
    return home


@pytest.mark.parametrize("others", [[], [{"name": "exact"}]])
def test_the_first_row_is_encoded_and_other_rewards_are_called(home: Path, others: list[dict[str, str]]) -> None:
    rewards = [{"name": "model", "path": "judge"}, *others]
    notes = rlctl.check("grpo.recipe.yaml", {"rewards": rewards}, try_rewards=True).notes
    text = "\n".join(notes)
    assert "rewards.0: the first row's own answer has 5 tokens of the model's tokenizer" in text
    assert ("train.jsonl: exact 1" in text) is bool(others)
    assert "is right" not in text and "not right" not in text


def test_a_template_that_refuses_the_first_row_is_a_problem_of_its_reward(home: Path) -> None:
    (home / "judge/chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError) as error:
        rlctl.check("grpo.recipe.yaml", {"rewards": [{"name": "model", "path": "judge"}]}, try_rewards=True)
    (problem,) = error.value.problems
    assert problem.key == "rewards.0.name" and "roles must alternate" in problem.what


def test_an_evaluation_refuses_one_and_names_the_remedy(home: Path) -> None:
    config = load(
        "grpo", "grpo.recipe.yaml", ['rewards=[{"name": "exact"}, {"name": "model", "path": "judge"}]']
    ).config
    with pytest.raises(EvaluationError, match=re.escape("rewards.1: an evaluation loads no reward model; give other")):
        refuse_reward_models(config)  # type: ignore[arg-type]


def test_tokenizers_are_loaded_without_ray_which_the_main_thread_starts_meanwhile() -> None:
    code = "import sys, rlctl.launch.reward_models; print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
