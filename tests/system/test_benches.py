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
TINY = ("--model", str(RECIPES / "tiny/qwen3-tiny"))
GAMES = ("--model", str(RECIPES / "tiny/qwen3-games"))
FEW_STEPS = (*TINY, "--seq-len", "16", "--batch", "4", "--steps", "2")
# Benches.
pytestmark = pytest.mark.long


def run_bench(folder: Path, *options: str) -> Any:
    """Run a bench on a machine without facts of any model. Return its JSON. No temporary file stays."""
    env = {**os.environ, "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [*BENCH, *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and list(folder.glob("rlctl-*")) == []
    return json.loads(done.stdout)


def test_programs_of_each_sandbox_are_counted(tmp_path: Path) -> None:
    report = run_bench(tmp_path, "sandbox", "--kinds", "process", "--seconds", "1")
    assert [row["work"] for row in report["rows"]] == ["alone", "files", "tests", "group", "call"]
    assert report["refusals"] == [] and all(row["rate"] > 0 and row["programs"] > 0 for row in report["rows"])


def test_both_ways_of_calling_workers_are_measured(tmp_path: Path) -> None:
    small = ("--workers", "1,4", "--payloads", "1KB,64KB", "--calls", "40")
    report = run_bench(tmp_path, "dispatch", *small)
    rows = report["rows"]
    assert [(row["workers"], row["payload"]) for row in rows] == [(n, size) for n in (1, 4) for size in (1024, 65536)]
    for row in rows:
        assert row["why"] == ""
        assert row["ratio"] == row["ordinary"] / row["compiled"]


def test_steps_with_state_left_and_moved_are_the_same_on_a_cpu(tmp_path: Path) -> None:
    report = run_bench(tmp_path, "offload", *FEW_STEPS)
    stayed, moved = report["rows"]
    assert report["copies"] is report["hidden"] is None
    assert (stayed["kind"], moved["kind"]) == ("left", "moved")
    assert stayed["losses"] == moved["losses"] and len(stayed["losses"]) == 3
    assert stayed["moved"] == moved["moved"] == [0, 0]
    assert all(row["log_probs"] > 0 and row["train"] > 0 for row in (stayed, moved))


def test_a_step_is_timed_in_each_mode(tmp_path: Path) -> None:
    report = run_bench(tmp_path, "sft", *FEW_STEPS)
    eager, graph = report["rows"]
    assert [eager["mode"], graph["mode"]] == ["eager", "eager-graph"]
    for row in (eager, graph):
        assert row["rate"] > 0 and row["first"] > 0 and row["mfu"] is None
    assert graph["speedup"] == graph["rate"] / eager["rate"]


def test_requests_of_agents_are_measured_for_one_session_and_for_many(tmp_path: Path) -> None:
    report = run_bench(tmp_path, "agents", "--bodies", "2KB,4KB", "--sessions", "4")
    assert [(round(row["body"] / 1024), row["sessions"], row["requests"]) for row in report["rows"]] == [
        (size, sessions, 8 * sessions) for size in (2, 4) for sessions in (1, 4)
    ]
    assert all(0 < row["server"] < 1 and 0 < row["driver"] < 1 for row in report["rows"])


def test_rows_sample_as_many_tokens_in_any_number_of_turns(tmp_path: Path) -> None:
    options = ["--turns", "1,2", "--tokens", "16", "--prompts", "2", "--generations", "2", "--rounds", "2"]
    report = run_bench(tmp_path, "generation", *GAMES, *options, "--pause", "0.05", "--spread", "0.3")
    assert [(row["turns"], row["tokens"], row["rollouts"]) for row in report["rows"]] == [(1, 16, 4), (2, 8, 4)]
    for row in report["rows"]:
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        rates = [64 / seconds for seconds in row["seconds"]]
        assert min(rates) <= row["rate"] <= max(rates)
        assert 0 <= row["prefix"] < 1 and 0 < row["at_once"] <= 4 and 0 < row["floor"] < row["step"]
        assert 0 <= row["idle"] < 1 and row["driver"] > 0
    # Two rollouts answer for 0.05 s at least, in each round.
    one_turn, two_turns = report["rows"]
    assert min(two_turns["seconds"]) > 0.05 and two_turns["idle"] > one_turn["idle"]
    assert report["spread"] == 0.3 and report["speed"] > 0 and not report["warnings"] and not report["interrupted"]


def test_a_killed_bench_leaves_no_trainer_behind() -> None:
    command = [*BENCH, "offload", *TINY, "--seq-len", "64", "--batch", "64", "--steps", "100000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("steps, optimizer state" in line for line in process.stderr)
        parent = psutil.Process(process.pid)
        children = list[psutil.Process]()
        while not any("spawn_main" in " ".join(child.cmdline()) for child in children):
            children = parent.children()
        process.kill()
    assert psutil.wait_procs(children, timeout=100)[1] == []
