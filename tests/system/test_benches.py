"""`rlctl bench` on CPU: real workers, steps, engines and environments, small; nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlctl.config.builtin import RECIPES

BENCH = [sys.executable, "-m", "rlctl.cli.main", "bench"]
TINY, GAMES = (("--model", str(RECIPES / "tiny" / name)) for name in ("qwen3-tiny", "qwen3-games"))
FEW_STEPS = (*TINY, "--seq-len", "16", "--batch", "4", "--steps", "2")
# Benches.
pytestmark = pytest.mark.long


def measured(folder: Path, *options: str) -> Any:
    """Return a bench's JSON, from a machine without facts of any model. No temporary file stays."""
    env = {**os.environ, "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [*BENCH, *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and list(folder.glob("rlctl-*")) == []
    return json.loads(done.stdout)


def test_both_ways_of_calling_workers_are_measured(tmp_path: Path) -> None:
    small = ("--workers", "1,4", "--payloads", "1KB,64KB", "--calls", "40")
    found = measured(tmp_path, "dispatch", *small)
    rows = found["rows"]
    assert [(row["workers"], row["payload"]) for row in rows] == [(n, size) for n in (1, 4) for size in (1024, 65536)]
    for row in rows:
        assert row["why"] == ""
        assert row["ratio"] == row["ordinary"] / row["compiled"]


def test_steps_with_state_left_and_moved_are_the_same_on_a_cpu(tmp_path: Path) -> None:
    found = measured(tmp_path, "offload", *FEW_STEPS)
    left, moved = found["rows"]
    assert found["copies"] is found["hidden"] is None
    assert (left["kind"], moved["kind"]) == ("left", "moved")
    assert left["losses"] == moved["losses"] and len(left["losses"]) == 3
    assert left["moved"] == moved["moved"] == [0, 0]
    assert all(row["log_probs"] > 0 and row["train"] > 0 for row in (left, moved))


def test_a_step_is_timed_in_each_mode(tmp_path: Path) -> None:
    found = measured(tmp_path, "sft", *FEW_STEPS)
    eager, graph = found["rows"]
    assert [eager["mode"], graph["mode"]] == ["eager", "eager-graph"]
    for row in (eager, graph):
        assert row["rate"] > 0 and row["first"] > 0 and row["mfu"] is None
    assert graph["speedup"] == graph["rate"] / eager["rate"]


def test_requests_of_agents_are_measured_for_one_session_and_for_many(tmp_path: Path) -> None:
    found = measured(tmp_path, "agents", "--bodies", "2KB,4KB", "--sessions", "4")
    assert [(round(row["body"] / 1024), row["sessions"], row["requests"]) for row in found["rows"]] == [
        (size, sessions, 8 * sessions) for size in (2, 4) for sessions in (1, 4)
    ]
    assert all(0 < row["server"] < 1 and 0 < row["driver"] < 1 for row in found["rows"])


def test_rows_sample_as_many_tokens_in_any_number_of_turns(tmp_path: Path) -> None:
    options = ["--turns", "1,2", "--tokens", "16", "--prompts", "2", "--generations", "2", "--rounds", "2"]
    found = measured(tmp_path, "generation", *GAMES, *options, "--pause", "0.05", "--spread", "0.3")
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


def test_a_killed_bench_leaves_no_trainer_behind() -> None:
    command = [*BENCH, "offload", *TINY, "--seq-len", "64", "--batch", "64", "--steps", "100000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("steps, optimizer state" in line for line in process.stderr)
        found, children = psutil.Process(process.pid), list[psutil.Process]()
        while not any("spawn_main" in " ".join(each.cmdline()) for each in children):
            children = found.children()
        process.kill()
    assert psutil.wait_procs(children, timeout=100)[1] == []
