"""`rlctl bench start` reads a run's parts from its records, and names the processes whose CPU seconds it read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.bench.frame import ResultTable
from rlctl.bench.starts import StartBench, StartResults, StartRow, _CpuReading, _read_row, drop_from_page_cache
from tests.waiting import until

EVENTS = [
    {"kind": "run_started", "time": 101.5},
    {"kind": "startup", "what": "ray", "time": 101.6},
    {"kind": "startup", "what": "ray", "time": 104.0, "seconds": 2.4},
    {"kind": "startup", "what": "trainer", "time": 106.0, "seconds": 1.9},
    {"kind": "processes", "time": 106.1, "trainer-0": 7},
    {"kind": "started", "time": 106.5},
]


def test_a_start_lasts_from_the_command_to_the_end_of_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 1, "time": 107.25}) + "\n")
    reading = _CpuReading(os.getpid())
    reading.seconds = {7: 3.0, os.getpid(): 1.0}
    row = _read_row(tmp_path, 100.0, reading)
    assert row.parts == {"command": 1.5, "ray": 2.4, "trainer": 1.9}
    assert (row.step, row.total) == (0.75, 7.25)
    assert row.cpu == {"trainer-0": 3.0, "others": 1.0}


def test_a_process_keeps_its_name_once_it_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)", "reaper.py"])
    reading = _CpuReading(os.getpid())

    def has_name() -> bool:
        reading.read()
        return "reapers" in reading.by_name({})

    until(has_name)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    reading.read()
    assert {"driver", "reapers"} <= reading.by_name({}).keys()
    child.wait()


def test_the_tables_have_every_start_and_the_smallest_values() -> None:
    rows = [
        StartRow({"ray": 3.0}, step=1.0, total=12.0, cpu={"driver": 4.0}),
        StartRow({"ray": 2.0, "probe": 0.5}, step=1.5, total=9.0, cpu={"driver": 5.0, "engine-0": 6.0}),
    ]
    phases, cpu = [part for part in StartResults(rows).report(wide=False) if isinstance(part, ResultTable)]
    assert phases.rows == [
        [("seconds", "ray"), ("start 1", "3.00"), ("start 2", "2.00"), ("smallest", "2.00")],
        [("seconds", "probe"), ("start 1", ""), ("start 2", "0.50"), ("smallest", "0.50")],
        [("seconds", "first step"), ("start 1", "1.00"), ("start 2", "1.50"), ("smallest", "1.00")],
        [("seconds", "to first step"), ("start 1", "12.00"), ("start 2", "9.00"), ("smallest", "9.00")],
    ]
    assert [row[0][1] for row in cpu.rows] == ["engine-0", "driver", "all"]
    assert cpu.rows[-1][1:] == [("start 1", "4.00"), ("start 2", "11.00"), ("smallest", "4.00")]


def test_files_of_a_package_are_read_again_after_they_left_the_page_cache() -> None:
    drop_from_page_cache("psutil")
    drop_from_page_cache("no_such_package")


@pytest.mark.long  # two starts
@pytest.mark.parametrize("recipe", [("grpo-tiny", "grpo"), ("sft-tiny", "sft")])
def test_a_start_is_measured_in_every_part(recipe: tuple[str, str], tmp_path: Path) -> None:
    bench = StartBench(*recipe, rounds=1, cold=False, overrides=[])
    (row,) = bench.measure(tmp_path, lambda text: None).rows
    assert {"command", "tokenizer", "ray", "data", "trainer"} <= row.parts.keys()
    assert 0 < row.step < row.total
    assert {"driver", "trainer-0", "imports for workers", "Ray's raylet"} <= row.cpu.keys()
