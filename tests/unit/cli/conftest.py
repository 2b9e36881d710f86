import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlctl.cli.main import answer
from tests.unit import folders


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Rlctl = Callable[..., Done]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, filled by `folders.write`. No GPU is visible."""
    monkeypatch.chdir(folders.write(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "home"


@pytest.fixture
def rlctl(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rlctl:
    """Return a function that runs the command line in this process, as if typed in `home`."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["rlctl", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            answer()
        code = exit_info.value.code
        out, err = capsys.readouterr()
        return Done(code if isinstance(code, int) else 0, out, err)

    return run


def write_run(home: Path, resolved: str) -> Path:
    """Write a run directory that holds a config, as a started run leaves it."""
    folder = home / "runs/first"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(resolved)
    (folder / "events.jsonl").write_text(json.dumps({"kind": "run_started", "time": 0}) + "\n")
    return folder
