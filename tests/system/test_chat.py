"""`rlctl chat` with a real engine: lines in, answers out, and the same answer after a restart."""

import subprocess
import sys

import pytest

from rlctl.config.builtin import RECIPES

SUMS = "12+30=\n7+8=\n/new\n12+30=\n"


@pytest.mark.slow
def test_lines_of_a_pipe_are_answered_and_new_forgets_what_was_said() -> None:
    command = [sys.executable, "-m", "rlctl.cli.main", "chat", str(RECIPES / "tiny/qwen3-tiny")]
    options = ["--temperature", "0", "--max-tokens", "4"]
    done = subprocess.run([*command, *options], input=SUMS, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    first, second, again = done.stdout.splitlines()
    assert first.startswith("model > ") and second.startswith("model > ")
    assert first == again
    assert done.stderr.splitlines() == [
        "qwen3-tiny, temperature 0; /new begins another conversation, Ctrl-D ends, /help shows more"
    ]
