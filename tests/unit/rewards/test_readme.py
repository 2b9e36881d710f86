"""The example of rlctl/rewards/README.md works as printed."""

import re
import sys
from pathlib import Path

import pytest

from rlctl.cli.main import answer
from rlctl.config.schema import GrpoConfig
from rlctl.preflight.load import load
from rlctl.rewards.base import RewardInput
from rlctl.rewards.scorer import Scorer

README = Path(__file__).parents[3] / "rlctl/rewards/README.md"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write my.yaml and my_rewards.py. Each is the page's first block of its language."""
    text = README.read_text()
    for language, name in (("python", "my_rewards.py"), ("yaml", "my.yaml")):
        block = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[0]
        assert block.startswith(f"# {name}\n")
        assert len(block.splitlines()) < 30
        (tmp_path / name).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "my.yaml"


def test_the_example_scores_as_its_docstrings_say(recipe: Path) -> None:
    config = load("grpo", str(recipe), []).config
    assert isinstance(config, GrpoConfig)
    # Completion, its value by `number`, and True if it is right.
    completions = [("49", 1.0, True), ("it is 12", 0.2, False), ("none", 0.0, False)]
    inputs = [RewardInput("15+34=", text, "49", {"max_chars": 20}) for text, _, _ in completions]
    with Scorer(config.rewards) as scorer:
        scores = scorer.score(inputs)
    for score, (text, number, is_right) in zip(scores, completions, strict=True):
        assert score.failed is None
        assert score.parts == {"number": number, "brevity": -len(text) / 20}
        assert score.value == pytest.approx(number - 0.1 * len(text) / 20)
        assert score.right == is_right


def test_the_command_tries_them_on_the_first_row(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = re.findall(r"```\n(rlctl config check .*?)\n```", README.read_text())
    assert commands == ["rlctl config check my.yaml --try-rewards"]
    monkeypatch.setattr(sys, "argv", commands[0].split())
    with pytest.raises(SystemExit) as exit_info:
        answer()
    stderr = capsys.readouterr().err
    assert not exit_info.value.code, stderr
    assert "number 1, brevity -0.02; its own answer is right" in " ".join(stderr.split())
