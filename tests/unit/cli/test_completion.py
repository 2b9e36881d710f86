"""Completion by the protocol of each shell's own script: bash splits at `=`, zsh and fish do not."""

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
    """A folder with recipes and runs, and `rlctl` on the path."""
    home = folders.write(tmp_path / "home")
    for name in ("sums", "sorts"):
        (home / "runs" / name).mkdir(parents=True)
        (home / "runs" / name / "events.jsonl").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/rlctl").write_text(PROGRAM)
    (tmp_path / "bin/rlctl").chmod(0o755)
    return home


def environment(home: Path) -> dict[str, str]:
    path = f"{home.parent / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"}


def bash(home: Path, *words: str) -> list[str]:
    """COMPREPLY of bash's own completion function for these words, the last one incomplete."""
    listed = " ".join(f"'{word}'" for word in words)
    script = (
        'eval "$(_RLCTL_COMPLETE=source_bash rlctl)"\n'
        f"COMP_WORDS=(rlctl {listed})\nCOMP_CWORD={len(words)}\n"
        '_rlctl_completion rlctl\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=home, env=environment(home), capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


def fish(home: Path, line: str) -> list[str]:
    asked = {
        "_RLCTL_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": line,
    }
    done = subprocess.run(
        ["rlctl"], cwd=home, env=environment(home) | asked, capture_output=True, text=True, check=False
    )
    return [row.split("\t")[0] for row in done.stdout.splitlines()]


def zsh(home: Path, line: str) -> str:
    asked = {"_RLCTL_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}
    done = subprocess.run(
        ["rlctl"], cwd=home, env=environment(home) | asked, capture_output=True, text=True, check=False
    )
    return done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_recipes_keys_and_values(home: Path) -> None:
    assert bash(home, "train", "grpo", "grpo-t") == ["grpo-tiny"]
    assert bash(home, "train", "grpo", "grpo.rec") == ["grpo.recipe.yaml"]
    keys = bash(home, "train", "sft", "sft-tiny", "trainer.optimizer.")
    assert "trainer.optimizer.lr=" in keys and all(key.startswith("trainer.optimizer.") for key in keys)
    # Two with an equal beginning: bash adds no space behind it.
    assert bash(home, "train", "grpo", "trainer.optimizer.lr") == [
        "trainer.optimizer.lr=",
        "trainer.optimizer.lr=1.0e-6",
    ]
    assert bash(home, "train", "grpo", "telemetry.dashboard", "=") == ["auto", "on", "off"]
    assert bash(home, "train", "grpo", "telemetry.dashboard", "=", "o") == ["on", "off"]


def test_zsh_and_fish_complete_a_value_behind_its_key(home: Path) -> None:
    assert fish(home, "rlctl train grpo telemetry.dashboard=o") == ["telemetry.dashboard=on", "telemetry.dashboard=off"]
    assert '"telemetry.dashboard=on":' in zsh(home, "rlctl train grpo telemetry.dashboard=o")
    losses = fish(home, "rlctl train grpo grpo.loss.name=")
    assert {"grpo.loss.name=grpo", "grpo.loss.name=gspo"} <= set(losses)


def test_runs_and_recipes_are_completed_where_one_is_asked_for(home: Path) -> None:
    assert set(fish(home, "rlctl runs rollouts s")) == {"sums", "sorts"}
    assert fish(home, "rlctl train grpo --resume su") == ["sums"]
    (home / "other").mkdir()
    (home / "runs/sums").rename(home / "other/sums")
    assert fish(home, "rlctl runs show --dir other ") == ["sums"]
    assert fish(home, "rlctl recipes show sft") == ["sft-games-tiny", "sft-lora-tiny", "sft-tiny"]
    assert "grpo-tiny" not in fish(home, "rlctl train sft ")
