"""`rlctl bench sft` on CPU: real steps, profiled, by ordinary calls and through a graph."""

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
def test_a_step_and_where_its_time_goes(tmp_path: Path) -> None:
    plot = tmp_path / "sft.svg"
    command = [sys.executable, "-m", "rlctl.cli.main", "bench", "sft", *SMALL, "--json", "--plot", str(plot)]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    eager, graph = found["rows"]
    assert [eager["mode"], graph["mode"]] == ["eager", "eager-graph"]
    for row in (eager, graph):
        assert row["rate"] > 0 and row["first"] > 0 and row["mfu"] is None
        assert 0 < row["busy"] <= 1 and any(cost["name"] == "aten::mm" for cost in row["costs"])
        assert sum(cost["share"] for cost in row["costs"]) <= 1
    assert graph["speedup"] == graph["rate"] / eager["rate"]
    assert "eager-graph" in plot.read_text()
    assert list(tmp_path.glob("rlctl-*")) == []
