"""`rlctl bench grpo` on CPU: real runs of the same work; Ctrl-C leaves neither processes nor folders behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.runs import survivors

SMALL = ("--prompts", "2", "--generations", "2", "--steps", "1", "--age", "1", "--lengths", "8,0.5,16")


# The temporary folder's path is longer than Ray's sockets allow, as on many clusters.
def start(temporary: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "rlctl.cli.main", "bench", "grpo", *SMALL, *arguments]
    env = {**os.environ, "TMPDIR": str(temporary)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.long  # two runs of a bench
def test_the_same_work_synchronous_and_in_flight_in_one_run(tmp_path: Path) -> None:
    bench = start(tmp_path, "--modes", "colocated,in-flight", "--json")
    out, err = bench.communicate(timeout=800)
    assert bench.returncode == 0, err
    report = json.loads(out)
    sync, flying = report["rows"]
    assert [sync["mode"], flying["mode"]] == ["sync, colocated", "async, in flight"]
    for row in (sync, flying):
        assert row["step"] > 0 and row["effective"] > 0
        assert 0 <= row["trainer_idle"] <= 1 and 0 <= row["generator_idle"] <= 1
    assert sync["sequences"] == 0 < flying["sequences"]
    assert (sync["age"], sync["speedup"]) == (0, 1)
    assert flying["age"] == 1 and flying["speedup"] == pytest.approx(flying["effective"] / sync["effective"])
    assert report["ceiling"] is None
    assert list(tmp_path.glob("rlctl-*")) == []


@pytest.mark.long  # variant: of a bench
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    bench = start(tmp_path, "--modes", "in-flight")
    end = time.monotonic() + 400
    while not list(tmp_path.glob("rlctl-bench-*/async-in-flight/events.jsonl")):
        assert bench.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    family = psutil.Process(bench.pid).children(recursive=True)
    bench.send_signal(signal.SIGINT)
    _, err = bench.communicate(timeout=400)
    assert bench.returncode == 130, err
    assert err.splitlines()[-1] == "interrupted"
    assert survivors(family) == []
    # The reaper of a run that was cut off at its start takes two seconds more.
    end = time.monotonic() + 20
    while list(tmp_path.glob("rlctl-*")) and time.monotonic() < end:
        time.sleep(0.1)
    assert list(tmp_path.glob("rlctl-*")) == []
