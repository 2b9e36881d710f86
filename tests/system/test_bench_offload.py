"""`rlctl bench offload` on CPU: real steps, in which nothing moves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.config.builtin import RECIPES

SMALL = ("--model", str(RECIPES / "tiny/qwen3-tiny"), "--seq-len", "16", "--batch", "4", "--steps", "2")


@pytest.mark.long  # a bench
@pytest.mark.slow
def test_steps_with_state_left_and_moved_are_the_same_on_a_cpu(tmp_path: Path) -> None:
    plot = tmp_path / "offload.svg"
    command = [sys.executable, "-m", "rlctl.cli.main", "bench", "offload", *SMALL, "--json", "--plot", str(plot)]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    left, moved = found["rows"]
    assert found["copies"] is found["hidden"] is None
    assert (left["kind"], moved["kind"]) == ("left", "moved")
    assert left["losses"] == moved["losses"] and len(left["losses"]) == 3
    assert left["moved"] == moved["moved"] == [0, 0]
    assert all(row["log_probs"] > 0 and row["train"] > 0 for row in (left, moved))
    assert "seconds of log-probs and an update" in plot.read_text()
    assert list(tmp_path.glob("rlctl-*")) == []
