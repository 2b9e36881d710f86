"""`rlctl bench generation` on CPU: a real engine and real environment processes, in one turn and in several."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.config.builtin import RECIPES

COMMAND = [sys.executable, "-m", "rlctl.cli.main", "bench", "generation", "--model", str(RECIPES / "tiny/qwen3-games")]


@pytest.mark.long  # a bench
@pytest.mark.slow
def test_rows_sample_as_many_tokens_in_any_number_of_turns(tmp_path: Path) -> None:
    plot = tmp_path / "generation.svg"
    options = ["--turns", "1,2", "--tokens", "16", "--prompts", "2", "--generations", "2", "--rounds", "2"]
    options += ["--pause", "0.05", "--spread", "0.3", "--json", "--plot", str(plot)]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, env=env, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(row["turns"], row["tokens"], row["rollouts"]) for row in found["rows"]] == [(1, 16, 4), (2, 8, 4)]
    for row in found["rows"]:
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        assert min(64 / each for each in row["seconds"]) <= row["rate"] <= max(64 / each for each in row["seconds"])
        assert 0 <= row["prefix"] < 1 and 0 < row["at_once"] <= 4 and 0 < row["floor"] < row["step"]
        assert 0 <= row["idle"] < 1 and row["driver"] > 0
    # Two rollouts answer for 0.05 s at least, in each round.
    one, two = found["rows"]
    assert min(two["seconds"]) > 0.05 and two["idle"] > one["idle"]
    assert found["spread"] == 0.3 and found["speed"] > 0 and not found["warnings"] and not found["interrupted"]
    assert "2 of 8" in plot.read_text()
    assert list(tmp_path.glob("rlctl-*")) == []
