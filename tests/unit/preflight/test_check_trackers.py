"""A tracker that cannot start is found before anything does."""

import tomllib
from pathlib import Path

import pytest

from rlctl.config.errors import ConfigError, Problem
from rlctl.config.plugins import TRACKERS
from rlctl.config.telemetry_schema import UserTrackerSection
from rlctl.preflight.load import load
from tests.unit.folders import GRPO

WANDB = "telemetry.trackers=[{name: wandb, project: mine}]"
MINE = """
URL = "http://host"

class Notes:
    def __init__(self, run, config, url: str, every: int = 1, more: dict[str, list[int]] | None = None) -> None: ...
    def write(self, kind, step, metrics): ...
    def close(self): ...

class Silent:
    def __init__(self, run, config): ...

def short(run): ...
"""
NO_NAME = (
    "name: not set, and has no default: tensorboard, wandb, mlflow, trackio, swanlab, or a class: module:Class or "
    "file.py:Class. The class is called with the run directory, the config and the further keys of its entry"
)
LOGIN = "no key for Weights & Biases: wandb login, or WANDB_API_KEY, or mode: offline"


def problems(*overrides: str) -> list[str]:
    try:
        load("grpo", "grpo.recipe.yaml", list(overrides))
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.fixture
def wandb(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install wandb for a user without a login. Return the user's folder."""
    (home / "site/wandb").mkdir(parents=True)
    (home / "site/wandb/__init__.py").write_text("")
    monkeypatch.syspath_prepend(home / "site")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    return home


NAMES = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
EVERY = (
    "telemetry.trackers=[tensorboard, {name: wandb, project: a}, mlflow, {name: trackio, project: a}, "
    "{name: swanlab, project: a, mode: offline}]"
)


@pytest.mark.parametrize("missing", [[name] for name in NAMES] + [list(NAMES)])
def test_trackers_that_are_not_installed_are_errors_with_what_to_type(
    home: Path, monkeypatch: pytest.MonkeyPatch, missing: list[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("rlctl.preflight.check_trackers.find_spec", lambda name: None if name in missing else name)
    assert problems(EVERY) == [
        f"override 1: {EVERY}: telemetry.trackers.{NAMES.index(name)}.name: {name} is not installed: "
        f"pip install 'rlctl[{name}]', or leave it out"
        for name in missing
    ]
    # A run on a cluster passes here: the machine that drives the run checks the trackers again.
    load("grpo", "grpo.recipe.yaml", [EVERY], away=True)


def test_each_tracker_is_an_extra_of_its_name() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert list(TRACKERS) == list(NAMES)
    assert all(extras[name][0].startswith(name) for name in NAMES)
    assert extras["trackers"] == [f"rlctl[{','.join(NAMES)}]"]


@pytest.mark.parametrize(
    ("entry", "expected", "file", "variable"),
    [
        (
            "{name: swanlab, project: a}",
            "no key for SwanLab: swanlab login, or SWANLAB_API_KEY, or mode: offline",
            ".swanlab/.netrc",
            "SWANLAB_API_KEY",
        ),
        (
            "{name: trackio, project: a, space: me/runs}",
            "no token for the Space me/runs: hf auth login, or HF_TOKEN, or space: null",
            ".cache/huggingface/token",
            "HF_TOKEN",
        ),
    ],
)
def test_trackers_that_send_need_a_key(
    wandb: Path, monkeypatch: pytest.MonkeyPatch, entry: str, expected: str, file: str, variable: str
) -> None:
    for name in ("SWANLAB_API_KEY", "SWANLAB_ROOT", "SWANLAB_SAVE_DIR", "HF_TOKEN", "HF_HOME", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("rlctl.preflight.check_trackers.find_spec", lambda name: name)
    override = f"telemetry.trackers=[{entry}]"
    assert problems(override) == [f"override 1: {override}: telemetry.trackers.0.name: {expected}"]
    monkeypatch.setenv(variable, "k")
    assert problems(override) == []
    monkeypatch.delenv(variable)
    (wandb / file).parent.mkdir(parents=True)
    (wandb / file).write_text("machine api.swanlab.cn login x password k\n")
    assert problems(override) == []


def test_wandb_without_a_key_is_an_error(wandb: Path) -> None:
    assert problems(WANDB) == [f"override 1: {WANDB}: telemetry.trackers.0.name: {LOGIN}"]
    (wandb / ".netrc").write_text("machine other.host login user password key\n")
    assert len(problems(WANDB)) == 1


@pytest.mark.parametrize("variable", ["WANDB_API_KEY=k", "WANDB_MODE=offline", "WANDB_IDENTITY_TOKEN_FILE=/token"])
def test_a_key_or_none_needed_by_the_environment(wandb: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(*variable.split("="))
    assert problems(WANDB) == []


def test_a_mode_that_sends_nothing_needs_no_key(wandb: Path) -> None:
    assert problems("telemetry.trackers=[{name: wandb, project: mine, mode: offline, tags: [a], group: b}]") == []


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
    assert problems(WANDB) == []


@pytest.mark.parametrize(
    ("trackers", "expected"),
    [
        ("{name: wandb, project: {a: 1}}", ["project: must be text, not a section"]),
        ("{name: wandb, projet: a}", [
            "projet: unknown key; did you mean project?",
            "project: not set, and has no default: The project there, for example {name: wandb, project: arithmetic}",
        ]),
        ("{name: tensorboard, project: a}", [
            "project: unknown key here: a key of wandb, trackio, swanlab; tensorboard has name"
        ]),
        ("{name: wandbb, project: a}", [
            "name: must be tensorboard, wandb, mlflow, trackio, swanlab or module:Class, not wandbb; did you mean "
            "wandb?"
        ]),
        ("{name: 'mine.py:Nots', url: a}", ["name: mine.py defines no Nots; did you mean Notes?"]),
        ("{nme: wandb}", ["nme: unknown key; did you mean name?", NO_NAME]),
        ("{name: wandb, project: ' '}", ["project: must not be empty"]),
        ("{name: mlflow, experiment: ''}", ["experiment: must not be empty"]),
        ("{name: wandb, project: a/b, id: 'c#'}", [
            r"project: must have none of / \ # ? % :, not a/b", r"id: must have none of / \ # ? % :, not c#"
        ]),
        ("{name: wandb, project: a, mode: ofline}\n    - {name: wandbb}", [
            "mode: must be online, offline, disabled or null, not 'ofline'; did you mean offline?",
            "telemetry.trackers.1.name: must be tensorboard, wandb, mlflow, trackio, swanlab or module:Class, not "
            "wandbb; did you mean wandb?",
        ]),
        ("{name: 'mine.py:Notes', url: 3, more: {a: [1]}}", []),
        ("{name: 'mine.py:Notes', ulr: a, every: x}", [
            "ulr: unknown key; did you mean url?",
            "url: not set, and Notes has no default",
            "every: must be a whole number, not 'x'",
        ]),
        ("{name: 'mine.py:Silent', url: a}", [
            "url: unknown key; Silent has none",
            "name: Silent lacks write(self, kind, step, metrics), close(self), which every tracker has",
        ]),
        ("'mine.py:short'", ["name: short is called with run, config first: too many positional arguments"]),
        ("'mine.py:URL'", ["name: must be a class, not str: `class URL:`"]),
        ("'broken.py:Notes'", ["name: cannot import: ZeroDivisionError: division by zero at broken.py:1"]),
        ("{project: a}", [NO_NAME]),
        ("3", [": must be a section of `key: value`, not 3"]),
    ],
)  # fmt: skip
def test_an_entry_that_is_wrong_is_told_by_its_key(
    wandb: Path, monkeypatch: pytest.MonkeyPatch, trackers: str, expected: list[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("rlctl.preflight.check_trackers.find_spec", lambda name: name)
    (wandb / "mine.py").write_text(MINE)
    (wandb / "broken.py").write_text("1 / 0\nclass Notes: ...\n")
    (wandb / "x.yaml").write_text(GRPO + f"telemetry:\n  trackers:\n    - {trackers}\n")
    problems = list[Problem]()
    try:
        load("grpo", "x.yaml", [])
    except ConfigError as error:
        problems = error.problems
    messages = list[str]()
    for problem in problems:
        key = problem.key.removeprefix("telemetry.trackers.0").lstrip(".")
        messages.append(f"{key}: {problem.what}")
    assert messages == expected
    # Each problem names a line of its entry, even if the key is missing.
    assert {problem.where for problem in problems} <= {"x.yaml:14", "x.yaml:15"}


def test_an_entry_of_the_users_own_comes_through_the_resolved_config(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTES_TOKEN", "secret")
    (home / "mine.py").write_text(MINE.replace("url: str, every: int = 1", "token: str"))
    entry = "{name: 'mine.py:Notes', token: '${oc.env:NOTES_TOKEN}', more: {a: [1]}}"
    (home / "x.yaml").write_text(GRPO + f"telemetry:\n  trackers:\n    - {entry}\n")
    composed = load("grpo", "x.yaml", [])
    (home / "again.yaml").write_text(composed.to_yaml())
    assert "secret" not in composed.to_yaml() and load("grpo", "again.yaml", []).config == composed.config
    (tracker,) = composed.config.telemetry.trackers
    assert isinstance(tracker, UserTrackerSection) and tracker.name == f"{home / 'mine.py'}:Notes"
    assert tracker.further == {"token": "secret", "more": {"a": [1]}}


def test_a_name_twice_is_an_error(home: Path) -> None:
    assert problems("telemetry.trackers=[tensorboard, tensorboard]")[0].endswith("tensorboard is in the list twice")
