"""Runs that end by a signal: recorded state, exit, and processes."""

import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from rlctl.run.interrupts import Interrupts, NotStopped, ignore_signals, stop_driver, stop_signals


@pytest.mark.parametrize(
    ("number", "by", "status"),
    [
        (signal.SIGINT, "Ctrl-C", "interrupted"),
        (signal.SIGTERM, "asked to stop", "stopped"),
        (signal.SIGHUP, "the terminal was closed", "stopped"),
    ],
)
def test_ctrl_c_interrupts_and_a_request_stops(number: signal.Signals, by: str, status: str) -> None:
    old_handler = signal.getsignal(number)
    requested = threading.Event()
    with Interrupts(requested.set) as interrupts:
        assert not interrupts.is_requested
        os.kill(os.getpid(), number)
        assert requested.wait(300)
        # Kernel and shell may both signal a closed terminal, so a second hangup does not end the run at once.
        os.kill(os.getpid(), signal.SIGHUP)
        assert (interrupts.is_requested, interrupts.by, interrupts.status) == (True, by, status)
    assert signal.getsignal(number) is old_handler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_ends_a_block_with_nothing_to_save(number: signal.Signals) -> None:
    with Interrupts(lambda: None) as interrupts:
        with interrupts.ends_block():
            pass
        with pytest.raises(KeyboardInterrupt), interrupts.ends_block():
            os.kill(os.getpid(), number)
            threading.Event().wait(300)
        assert interrupts.is_requested
        # The start does not begin again.
        with pytest.raises(KeyboardInterrupt), interrupts.ends_block():
            pytest.fail("the block was entered")


@pytest.mark.parametrize("handle_signals", [lambda: Interrupts(pytest.fail), stop_signals, ignore_signals])
def test_a_hangup_that_is_ignored_stays_ignored(handle_signals: Callable[[], AbstractContextManager[object]]) -> None:
    old_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, old_handler)


def test_outside_such_a_block_a_signal_only_asks() -> None:
    with Interrupts(lambda: None) as interrupts:
        with interrupts.ends_block():
            pass
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.is_requested


def test_the_second_ctrl_c_gives_the_terminal_back_and_says_how_to_go_on(tmp_path: Path) -> None:
    """End a separate process, which has the dashboard on a terminal's screen."""
    screen_file, terminal_file = pty.openpty()
    program = f"""
import os, pathlib, signal, time
from rich.console import Console
from rlctl.dashboard.view import LiveDashboard
from rlctl.run.interrupts import Interrupts
from tests.unit.dashboard.synthetic import write_run
with LiveDashboard(write_run(pathlib.Path({str(tmp_path)!r}), ended=None), Console(force_terminal=True)) as view:
    with Interrupts(lambda: None, lambda: view.give_back("go on: rlctl train")):
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=terminal_file, timeout=60)
    os.close(terminal_file)
    screen = b""
    with suppress(OSError):  # the end of a terminal
        while chunk := os.read(screen_file, 1 << 16):
            screen += chunk
    assert done.returncode == 130 and b"\x1b[?1049h" in screen
    assert screen.endswith(b"\x1b[?1049l\x1b[?25hgo on: rlctl train\r\n")


@pytest.mark.parametrize(
    ("start", "message", "code"),
    [
        ({"host": "gpu7", "pid": 1}, "a is driven on gpu7: stop it there, or press Ctrl-C", 2),
        ({}, "a is driven on no machine that is known: stop it there, or press Ctrl-C", 2),
        ({"host": "here"}, "the events of a do not name its driver: stop it where it runs, with Ctrl-C", 2),
        ({"host": "here", "pid": "x"}, "the events of a do not name its driver: stop it where it runs, with Ctrl-C", 2),
        # No process has a larger number.
        ({"host": "here", "pid": 1 << 22}, "process 4194304, which drives a, cannot be told: No such process", 1),
    ],
)
def test_a_driver_that_cannot_be_stopped_is_one_line(start: dict[str, Any], message: str, code: int) -> None:
    if start.get("host") == "here":
        start = {**start, "host": socket.gethostname()}
    with pytest.raises(NotStopped) as refusal:
        stop_driver("a", start)
    assert (str(refusal.value), refusal.value.exit_code) == (message, code)
