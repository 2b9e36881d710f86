"""A tracker that cannot start is found before anything does."""

import importlib.util
from pathlib import Path

import pytest

from rlctl.config.errors import ConfigError
from rlctl.preflight.load import load
from tests.unit.folders import GRPO

ASKED = ["telemetry.wandb_project=mine", "telemetry.tensorboard=true"]
LOGIN = "no key for Weights & Biases: wandb login, or WANDB_API_KEY, or WANDB_MODE=offline"


def problems(*overrides: str) -> list[str]:
    try:
        load("grpo", "grpo.recipe.yaml", list(overrides))
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.fixture
def wandb(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wandb that is installed, and a user who has never logged in; his folder."""
    (home / "site/wandb").mkdir(parents=True)
    (home / "site/wandb/__init__.py").write_text("")
    monkeypatch.syspath_prepend(home / "site")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    return home


def test_trackers_that_are_not_installed_are_errors_with_what_to_type(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "rlctl.preflight.check_trackers.find_spec",
        lambda name: None if name in ("wandb", "tensorboard") else found(name),
    )
    assert problems(*ASKED) == [
        "override 2: telemetry.tensorboard=true: tensorboard is not installed: pip install 'rlctl[tensorboard]', or "
        "false",
        "override 1: telemetry.wandb_project=mine: wandb is not installed: pip install 'rlctl[wandb]', or null",
    ]
    # Elsewhere it is looked at again, by the machine that drives the run.
    load("grpo", "grpo.recipe.yaml", ASKED, away=True)


def test_wandb_without_a_key_is_an_error(wandb: Path) -> None:
    assert problems(ASKED[0]) == [f"override 1: {ASKED[0]}: {LOGIN}"]
    (wandb / ".netrc").write_text("machine other.host login user password key\n")
    assert len(problems(ASKED[0])) == 1


@pytest.mark.parametrize("variable", ["WANDB_API_KEY=k", "WANDB_MODE=offline", "WANDB_IDENTITY_TOKEN_FILE=/token"])
def test_a_key_or_none_needed_by_the_environment(wandb: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(*variable.split("="))
    assert problems(ASKED[0]) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (".netrc", "machine api.wandb.ai login user password key\n"),
        ("wandb/settings", "[default]\nmode = offline\n"),
    ],
)
def test_a_key_or_none_needed_by_what_wandb_has_written(wandb: Path, file: str, text: str) -> None:
    (wandb / file).parent.mkdir(exist_ok=True)
    (wandb / file).write_text(text)
    assert problems(ASKED[0]) == []


def test_a_project_that_is_no_text_is_one_problem(wandb: Path) -> None:
    (wandb / "x.yaml").write_text(GRPO + "telemetry: {wandb_project: {a: 1}}\n")
    with pytest.raises(ConfigError) as caught:
        load("grpo", "x.yaml", [])
    assert [problem.what for problem in caught.value.problems] == ["must be text or null, not a section"]
