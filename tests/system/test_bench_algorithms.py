"""`rlctl bench algorithms` on CPU: real runs of the tiny recipe, a row and a curve for each algorithm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long  # two whole runs; table, target and plot: tests/unit/bench/test_algorithms.py
def test_two_algorithms_are_compared_by_held_out_accuracy(tmp_path: Path) -> None:
    plot = tmp_path / "curves.svg"
    short = ("--seeds", "1", "--steps", "2", "--target", "0.4", "--set", "data.validation.limit=32")
    command = [sys.executable, "-m", "rlctl.cli.main", "bench", "algorithms", "grpo", "rloo", *short, "--json"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.run([*command, "--plot", str(plot)], capture_output=True, text=True, env=env, timeout=600)
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert [row["name"] for row in report["rows"]] == ["grpo", "rloo"]
    for row in report["rows"]:
        (run,) = row["runs"]
        assert (run["steps"], run["rollouts"]) == ([0, 2], [0, 2 * 64 * 8])
        assert run["seconds"][0] == 0 < run["seconds"][1]
        assert row["to_target"] == {"reached": 1, "rollouts": 0, "seconds": 0}
    assert "rloo, seed 0 (run 2 of 2): step 2, accuracy" in process.stderr
    assert "rloo" in plot.read_text()
    assert list(tmp_path.glob("rlctl-*")) == []
