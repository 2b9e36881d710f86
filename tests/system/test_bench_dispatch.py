"""`rlctl bench dispatch` on CPU: real workers, both ways of calling them, a table of what was measured."""

import json
import subprocess
import sys

import pytest


@pytest.mark.long  # a bench
@pytest.mark.slow
def test_both_ways_are_measured() -> None:
    small = ("--workers", "1,4", "--payloads", "1KB,64KB", "--calls", "40", "--json")
    command = [sys.executable, "-m", "rlctl.cli.main", "bench", "dispatch", *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    rows = json.loads(done.stdout)
    assert [(row["workers"], row["payload"]) for row in rows] == [(n, size) for n in (1, 4) for size in (1024, 65536)]
    for row in rows:
        assert row["why"] == ""
        assert 0 < row["submit"]["median"] <= row["compiled"]["median"]
        assert 0 < row["plain_submit"]["median"] < row["plain"]["median"]
        assert row["ratio"] == row["ordinary"]["median"] / row["compiled"]["median"]
        assert row["ordinary"]["calls"] == 36
