"""`rlctl bench refit` on CPU: real engines, real transports; a changed bit ends it with 1; memory does not grow."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.runs import survivors
from tests.tiny_models import make_model

MIB = 1 << 20
FLIP = """
import sys
from pathlib import Path
from rlctl.bench.refit import _Stage

compare = _Stage._differences

def flip_then_compare(self):
    for file in (self._folder / "refit").glob("slot*"):
        with file.open("r+b") as slot:
            slot.seek(4000)
            byte = slot.read(1)[0]
            slot.seek(4000)
            slot.write(bytes([byte ^ 1]))
    return compare(self)

_Stage._differences = flip_then_compare
from rlctl.cli.main import main
main()
"""


def bench(*arguments: str, program: tuple[str, ...] = ("-m", "rlctl.cli.main")) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program, "bench", "refit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)


def rows(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in json.loads(result.stdout)["rows"]}


@pytest.mark.long  # three hundred refits; test_refit.py makes a few
def test_three_hundred_refits_through_host_memory_deliver_every_bit_and_leave_memory_as_it_was(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    result = bench("--model", str(folder), "--rounds", "300", "--updates", "1", "--json")
    assert result.returncode == 0, result.stderr
    rows_by_label = rows(result)
    labels = [f"rlctl shm, staged, 2 buffers, checks {checks}" for checks in ("all", "off")]
    assert [*rows_by_label] == ["memcpy", *labels]
    for label in labels:
        row = rows_by_label[label]
        assert row["checked"] and row["wrong"] == []
        assert row["trainer_growth"] < 16 * MIB
        assert row["engine_growth"] < 16 * MIB


@pytest.mark.long  # variant: of a bench
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    command = [sys.executable, "-m", "rlctl.cli.main", "bench", "refit", "--model", str(folder), "--rounds", "100000"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as running:
        assert running.stderr is not None
        while "rlctl: shm" not in running.stderr.readline():
            assert running.poll() is None
        weights = list(Path("/dev/shm").glob("rlctl-bench-*"))
        family = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=100)
    assert running.returncode == 130, err
    assert err.splitlines()[-1] == "interrupted"
    assert len(family) > 2 and survivors(family) == []
    assert list(tmp_path.glob("rlctl-*")) == []
    assert weights and not any(folder.exists() for folder in weights)


@pytest.mark.long  # a bench, and repetitions
def test_a_thousand_refits_from_two_ranks_deliver_every_bit_and_leave_memory_as_it_was(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    many = ("--rounds", "1000", "--updates", "1", "--trainers", "2", "--checksum", "all")
    result = bench("--model", str(folder), *many, "--transport", "shm,broadcast", "--json")
    assert result.returncode == 0, result.stderr
    rows_by_label = rows(result)
    labels = ["rlctl shm, staged, 2 buffers, checks all", "rlctl broadcast, staged, 2 buffers, checks all"]
    assert [*rows_by_label] == ["memcpy", *labels]
    assert all(row["wrong"] == [] and row["seconds"] > 0 for row in rows_by_label.values())
    for label in labels:
        row = rows_by_label[label]
        assert row["checked"] and row["stall"] >= 0
        assert row["trainer_growth"] < 16 * MIB
        assert row["engine_growth"] < 16 * MIB


@pytest.mark.long  # variant of test_refit.py, of a bench
def test_one_flipped_bit_ends_with_1_and_names_the_tensor(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    few = ("--rounds", "2", "--updates", "0", "--checksum", "off")
    result = bench("--model", str(folder), *few, program=("-c", FLIP))
    assert result.returncode == 1
    assert "delivered weights differ from the sent ones: model.embed_tokens.weight" in result.stderr
    assert "differ" in result.stdout
