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
    """my.yaml and my_rewards.py, each the first block of its language."""
    blocks = dict(reversed(re.findall(r"```(python|yaml)\n(.*?)```", README.read_text(), re.DOTALL)))
    for language, name in (("python", "my_rewards.py"), ("yaml", "my.yaml")):
        assert blocks[language].startswith(f"# {name}\n")
        assert len(blocks[language].splitlines()) < 30
        (tmp_path / name).write_text(blocks[language])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "my.yaml"


def test_the_example_scores_as_its_docstrings_say(recipe: Path) -> None:
    config = load("grpo", str(recipe), []).config
    assert isinstance(config, GrpoConfig)
    answers = {"49": (1.0, True), "it is 12": (0.2, False), "none": (0.0, False)}
    with Scorer(config.rewards) as scorer:
        scores = scorer.score([RewardInput("15+34=", text, "49", {"max_chars": 20}) for text in answers])
    for score, (text, (number, right)) in zip(scores, answers.items(), strict=True):
        assert score.failed is None
        assert score.parts == {"number": number, "brevity": -len(text) / 20}
        assert score.value == pytest.approx(number - 0.1 * len(text) / 20)
        assert score.right == right


def test_the_command_tries_them_on_the_first_row(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = re.findall(r"```\n(rlctl config check .*?)\n```", README.read_text())
    assert command == ["rlctl config check my.yaml --try-rewards"]
    monkeypatch.setattr(sys, "argv", command[0].split())
    with pytest.raises(SystemExit) as end:
        answer()
    said = capsys.readouterr().err
    assert not end.value.code, said
    assert "number 1, brevity -0.02; its own answer is right" in " ".join(said.split())
