"""A suite that loses one of its processes ends, and names the test that was lost."""

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
KILLED = """
import os, pathlib, signal

def test_passes():
    pass

def test_ends_its_process():
    pathlib.Path(__file__).with_suffix(".killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
ENDLESS = """
import time

def test_goes_on():
    time.sleep(10_000)
"""


def test_a_lost_process_ends_the_suite_and_fails_its_test_by_name(tmp_path: Path) -> None:
    """The other process is in the middle of a test, which would go on for hours. The suite ends within a minute."""
    (tmp_path / "test_killed.py").write_text(KILLED)
    (tmp_path / "test_endless.py").write_text(ENDLESS)
    suite = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    options = ["-n", "2", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    session = subprocess.run([*suite, *options], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert time.time() - (tmp_path / "test_killed.killed").stat().st_mtime < 60
    assert session.returncode == 2, session.stdout + session.stderr
    # In CI, pytest writes a failure's message behind its name.
    assert re.search(r"FAILED \S*/test_killed.py::test_ends_its_process( - .*)?\n", session.stdout)
    assert "was lost: Not properly terminated" in session.stdout
    assert "1 failed, 1 passed" in session.stdout
