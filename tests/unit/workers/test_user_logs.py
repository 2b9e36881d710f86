"""Logs of a user's code are safe to show on a terminal."""

import os
from pathlib import Path

from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.workers.user_logs import FailureLog, OutputLog


def test_a_log_has_pictures_in_place_of_control_characters(tmp_path: Path) -> None:
    output = OutputLog("environment", tmp_path / "environments.log", None)
    os.write(output.descriptor, b"\x1b]0;title\x07 5 \xe2\x82")  # the rest of the character comes later
    os.write(output.descriptor, b"\xac \xff\n")
    output.close()
    assert (tmp_path / "environments.log").read_text() == "␛]0;title␇ 5 € \ufffd\n"


def test_a_traceback_has_pictures_in_place_of_control_characters(tmp_path: Path) -> None:
    failures = FailureLog("tool", tmp_path / "tool-errors.log")
    failures.add("game", EnvironmentFailure("raised", "red", "\x1b[31m", "at\x1b[0m"))
    assert (tmp_path / "tool-errors.log").read_text() == "game: red: ␛[31m\nat␛[0m\n"
