"""While the dashboard is on the screen, other output of the process goes to the log."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.dashboard.view import terminal_alone


def test_prints_of_python_native_code_and_children_go_to_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with terminal_alone(tmp_path / "driver.log") as terminal:
        os.write(1, b"native\n")
        subprocess.run([sys.executable, "-c", "import sys; print('child', file=sys.stderr)"], check=True)
        print("picture ▁▂▃", file=terminal, flush=True)
    os.write(1, b"after\n")
    assert (tmp_path / "driver.log").read_text() == "native\nchild\n"
    assert capfd.readouterr().out == "picture ▁▂▃\nafter\n"


def test_the_terminal_comes_back_after_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), terminal_alone(tmp_path / "driver.log"):
        raise ValueError
    os.write(2, b"seen\n")
    assert capfd.readouterr().err == "seen\n"
