"""`rlctl bench sequences` on CPU: real GRPO updates of two lengths, and what Ctrl-C leaves."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.config.builtin import RECIPES

COMMAND = [sys.executable, "-m", "rlctl.cli.main", "bench", "sequences", "--model", str(RECIPES / "tiny/qwen3-tiny")]


@pytest.mark.long  # a bench
@pytest.mark.slow
def test_rows_train_as_many_tokens_at_each_length(tmp_path: Path) -> None:
    plot = tmp_path / "lengths.svg"
    options = ["--lengths", "16,64", "--tokens", "128", "--steps", "2", "--json", "--plot", str(plot)]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, env=env, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(row["length"], row["sequences"]) for row in found["rows"]] == [(16, 8), (64, 2)]
    for row in found["rows"]:
        assert row["rate"] == pytest.approx(128 / row["step"]) and row["mfu"] is None and row["forecast"] > 0
        # Weights move, since a gradient is left by clipping.
        assert len(set(row["losses"])) == 3 and not found["interrupted"]
    assert "64 tokens" in plot.read_text()
    assert list(tmp_path.glob("rlctl-*")) == []


@pytest.mark.long  # a bench
@pytest.mark.slow
def test_ctrl_c_shows_the_lengths_that_are_finished() -> None:
    command = [*COMMAND, "--lengths", "16,64", "--tokens", "64", "--steps", "1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        said = next(line for line in process.stderr if "of 64 tokens" in line)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    found = json.loads(out)
    assert (process.returncode, [row["length"] for row in found["rows"]]) == (130, [16]), said + err
    assert found["interrupted"] and "interrupted: this is what was finished" in err


@pytest.mark.long  # a bench
@pytest.mark.slow
def test_a_killed_bench_leaves_no_trainer_behind() -> None:
    import psutil

    command = [*COMMAND, "--lengths", "64", "--tokens", "4096", "--steps", "100000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("of 64 tokens" in line for line in process.stderr)
        found, children = psutil.Process(process.pid), list[psutil.Process]()
        while not any("spawn_main" in " ".join(each.cmdline()) for each in children):
            children = found.children()
        process.kill()
    assert psutil.wait_procs(children, timeout=10)[1] == []
