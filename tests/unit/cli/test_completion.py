"""Completion, called as by each shell's script. bash splits words at `=`, zsh and fish do not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit import folders

SOURCE = Path(__file__).parents[3]
PROGRAM = f"#!{sys.executable}\nimport sys\nsys.argv[0] = 'rlctl'\nfrom rlctl.cli.main import main\nmain()\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a folder with recipes and runs. A program `rlctl` is in `../bin`."""
    home = folders.write(tmp_path / "home")
    for name in ("sums", "sorts"):
        (home / "runs" / name).mkdir(parents=True)
        (home / "runs" / name / "events.jsonl").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/rlctl").write_text(PROGRAM)
    (tmp_path / "bin/rlctl").chmod(0o755)
    return home


def make_environment(home: Path) -> dict[str, str]:
    """Return this process's environment variables, with the program `rlctl` on PATH."""
    path = f"{home.parent / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"}


def complete_in_bash(home: Path, *words: str) -> list[str]:
    """Return COMPREPLY, as bash's completion function sets it for these words. The last word is incomplete."""
    quoted_words = " ".join(f"'{word}'" for word in words)
    script = (
        'eval "$(_RLCTL_COMPLETE=source_bash rlctl)"\n'
        f"COMP_WORDS=(rlctl {quoted_words})\nCOMP_CWORD={len(words)}\n"
        '_rlctl_completion rlctl\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=home,
        env=make_environment(home),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def ask_completion(home: Path, request: dict[str, str]) -> str:
    """Return the answer of `rlctl` to a shell's script. request: the variables that the script sets."""
    variables = make_environment(home) | request
    return subprocess.run(["rlctl"], cwd=home, env=variables, capture_output=True, text=True, check=False).stdout


def complete_in_fish(home: Path, line: str) -> list[str]:
    request = {
        "_RLCTL_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": line,
    }
    return [row.split("\t")[0] for row in ask_completion(home, request).splitlines()]


def complete_in_zsh(home: Path, line: str) -> str:
    return ask_completion(home, {"_RLCTL_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line})


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_recipes_keys_and_values(home: Path) -> None:
    assert complete_in_bash(home, "train", "grpo", "grpo-t") == ["grpo-tiny"]
    assert complete_in_bash(home, "train", "grpo", "grpo.rec") == ["grpo.recipe.yaml"]
    keys = complete_in_bash(home, "train", "sft", "sft-tiny", "trainer.optimizer.")
    assert "trainer.optimizer.lr=" in keys and all(key.startswith("trainer.optimizer.") for key in keys)
    # Two keys begin with this text, so that bash adds no space.
    assert complete_in_bash(home, "train", "grpo", "trainer.optimizer.lr") == [
        "trainer.optimizer.lr=",
        "trainer.optimizer.lr=1.0e-6",
    ]
    assert complete_in_bash(home, "train", "grpo", "telemetry.dashboard", "=") == ["auto", "on", "off"]
    assert complete_in_bash(home, "train", "grpo", "telemetry.dashboard", "=", "o") == ["on", "off"]


def test_zsh_and_fish_complete_a_value_behind_its_key(home: Path) -> None:
    line = "rlctl train grpo telemetry.dashboard=o"
    assert complete_in_fish(home, line) == ["telemetry.dashboard=on", "telemetry.dashboard=off"]
    assert '"telemetry.dashboard=on":' in complete_in_zsh(home, line)
    losses = complete_in_fish(home, "rlctl train grpo grpo.loss.name=")
    assert {"grpo.loss.name=grpo", "grpo.loss.name=gspo"} <= set(losses)


def test_runs_and_recipes_are_completed_where_one_is_asked_for(home: Path) -> None:
    assert set(complete_in_fish(home, "rlctl runs rollouts s")) == {"sums", "sorts"}
    assert complete_in_fish(home, "rlctl train grpo --resume su") == ["sums"]
    (home / "other").mkdir()
    (home / "runs/sums").rename(home / "other/sums")
    assert complete_in_fish(home, "rlctl runs show --dir other ") == ["sums"]
    supervised = [f"sft-{name}tiny" for name in ("code-", "games-", "lora-", "taught-", "")]
    assert complete_in_fish(home, "rlctl recipes show sft") == supervised
    assert "grpo-tiny" not in complete_in_fish(home, "rlctl train sft ")
