"""If its folder was removed or its streams are closed, a command prints one line or nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.dashboard.synthetic import write_run

RLCTL = f"{sys.executable} -m rlctl.cli.main"
COMMANDS = ("runs list --dir {runs}", "runs show --dir {runs}", "config show grpo-tiny.yaml", "--help", "recipes list")


def run_in_bash(line: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["bash", "-c", line], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_nobody_listens(tmp_path: Path, command: str) -> None:
    write_run(tmp_path, "a", ended="done")
    line = f"{RLCTL} {command.format(runs=tmp_path)}"
    closed = run_in_bash(f"{line} >&-", tmp_path)
    assert (closed.returncode, closed.stderr) == (0, "")
    assert run_in_bash(f"{line} 2>&-", tmp_path).returncode == 0
    assert run_in_bash(f"{line} <&- >&- 2>&-", tmp_path).returncode == 0
    gone = run_in_bash(f"{line} | head -0; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert gone.returncode in (0, 1) and gone.stderr == ""


def test_an_error_has_its_code_whoever_listens(tmp_path: Path) -> None:
    assert run_in_bash(f"{RLCTL} runs show nope >&- 2>&-", tmp_path).returncode == 2


@pytest.mark.parametrize("command", ["runs list", "train grpo", "train grpo --dry-run", "doctor", "eval x"])
def test_a_working_directory_that_was_removed_is_one_line(tmp_path: Path, command: str) -> None:
    done = run_in_bash(f"mkdir gone && cd gone && rmdir ../gone && {RLCTL} {command}", tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[0] == (
        "error: the working directory cannot be read: No such file or directory; cd to one that exists"
    )
