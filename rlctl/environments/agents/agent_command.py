"""An agent that is a command: started once for each rollout, and ended with all processes that it started.

Each command runs below its own supervisors (workers/supervisor.py). A mark in the environment variables would not find
all of its processes, because `env -i` and setproctitle remove such a mark.
"""

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlctl.environments.agents.agent_episode import AgentLaunch
from rlctl.environments.outcomes import NOT_STARTED, EnvironmentFailure
from rlctl.utils.user_code import shorten_text
from rlctl.workers import supervisor

# Seconds between SIGTERM and SIGKILL for a command's processes.
TERM_S = 2.0
# Most seconds of reading the rest of a command's output after its end.
_OUTPUT_S = 1.0
# Most bytes of a command's output that reach the log. Further output is read with pauses of `_PAUSE_S` seconds, so that
# a flood of output takes little processor time.
MAX_OUTPUT = 1 << 20
_READ_BYTES = 1 << 16
_PAUSE_S = 0.01
# Most bytes at the end of the output in which the last line is looked for.
_MAX_LINE = 1 << 16
_OUTPUT_CUT = b"\n[the agent printed more than 1 MiB: the rest is left out]\n"
# Shells exit with this number plus the signal's number if a signal ended the program.
_BY_SIGNAL = 128


def start_command(command: list[str], launch: AgentLaunch) -> Callable[[], None]:
    """Start a command in a new process session. Return a function that stops the command and its child processes.

    If the last line of the output is JSON, a number or an object with `reward`, it is the agent's reward.
    `AgentLaunch.on_end` is called once all of the command's processes have ended.
    """
    variables = {
        **os.environ,
        "OPENAI_BASE_URL": launch.base_url,
        "OPENAI_API_KEY": launch.api_key,
        "ANTHROPIC_BASE_URL": launch.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": launch.api_key,
        "RLCTL_BASE_URL": launch.base_url,
        "RLCTL_API_KEY": launch.api_key,
        "RLCTL_TASK": json.dumps(asdict(launch.task), default=str),
        "RLCTL_SEED": str(launch.generator.getrandbits(31)),
        # Without these variables some agents send telemetry, or put a mark into each request that changes each time.
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    try:
        process, connection = _begin_supervised(command, variables)
    except OSError as error:
        launch.loop.call_soon(launch.on_end, _start_failure(command, launch, error.errno))
        return lambda: None
    return _Command(command, process, connection, launch).stop


def _begin_supervised(command: list[str], variables: dict[str, str]) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start a command below supervisors.

    Returns the outer supervisor, and a connection that gets the error number if the command cannot be started.
    """
    connection, child_end = socket.socketpair()
    with child_end:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, str(child_end.fileno()), *command],
                env=variables,
                pass_fds=[child_end.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError:
            connection.close()
            raise
    return process, connection


def _name_of(command: list[str]) -> str:
    return Path(command[0]).name


def _start_failure(command: list[str], launch: AgentLaunch, error_number: int | None) -> EnvironmentFailure:
    """Return the failure of a command that the system refused to start."""
    detail = str(OSError(error_number, os.strerror(error_number or 0), command[0]))
    if error_number == errno.E2BIG:
        task = json.dumps(asdict(launch.task), default=str)
        detail += f": RLCTL_TASK has {len(task):,} characters"
    return EnvironmentFailure("raised", f"{_name_of(command)} {NOT_STARTED}", detail)


class _Command:
    """A running command.

    process: the outer supervisor. It ends after all of the command's processes, with the command's exit code.
    connection: gets an error number if the command cannot be started.
    """

    def __init__(
        self, command: list[str], process: "subprocess.Popen[bytes]", connection: socket.socket, launch: AgentLaunch
    ) -> None:
        self._command = command
        self._process = process
        self._connection = connection
        self._launch = launch
        # End of the command's output.
        self._tail = b""
        self._reader = threading.Thread(target=self._pass_output, name="agent's output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name="agent's end", daemon=True).start()

    def stop(self) -> None:
        """Ask the command's processes to end, and end them `TERM_S` seconds later. Called on the event loop."""
        assert self._process.stdin
        # The supervisors send SIGTERM for each byte, and SIGKILL once their input closes.
        with suppress(OSError, ValueError):  # the command has ended
            self._process.stdin.write(b".")
        self._launch.loop.call_later(TERM_S, self._process.stdin.close)

    def _watch(self) -> None:
        code = self._process.wait()
        self._reader.join(_OUTPUT_S)
        with suppress(RuntimeError):  # the event loop is closed, because this process is about to end
            self._launch.loop.call_soon_threadsafe(self._tell_end, code)

    def _tell_end(self, code: int) -> None:
        """Call `on_end` with the command's value or failure.

        Called on the event loop, like `stop`, so that `stop` cannot write to a closed descriptor.
        """
        assert self._process.stdin
        self._process.stdin.close()
        with self._connection:
            self._connection.setblocking(False)
            with suppress(BlockingIOError):
                if error_number := self._connection.recv(_READ_BYTES):
                    self._launch.on_end(_start_failure(self._command, self._launch, int(error_number)))
                    return
        last_line = self._tail.rstrip().rpartition(b"\n")[2].decode(errors="replace").strip()
        outcome: Any = _read_value(last_line)
        if code:
            # The code is negative if a signal ended the supervisor itself.
            signal_number = -code if code < 0 else code - _BY_SIGNAL
            ending = f"exited with {code}"
            # A code above 128 need not mean a signal: ssh and `sys.exit(-1)` exit with 255.
            if signal_number in signal.valid_signals():
                ending = f"was ended by signal {signal_number}"
            outcome = EnvironmentFailure("raised", f"{_name_of(self._command)} {ending}", shorten_text(last_line))
        self._launch.on_end(outcome)

    def _pass_output(self) -> None:
        """Copy the command's output to the log, up to `MAX_OUTPUT`, and keep the end of the standard output."""
        assert self._process.stdout and self._process.stderr
        output = self._process.stdout.fileno()
        errors = self._process.stderr.fileno()
        logs = {output: sys.stdout.buffer, errors: sys.stderr.buffer}
        bytes_left = MAX_OUTPUT
        poll = select.poll()
        for descriptor in logs:
            poll.register(descriptor)
        while logs:
            for descriptor, _ in poll.poll():
                text = os.read(descriptor, _READ_BYTES)
                if not text:
                    poll.unregister(descriptor)
                    del logs[descriptor]
                    continue
                if descriptor == output:
                    self._tail = (self._tail + text)[-_MAX_LINE:]
                # Output beyond the bound is read and dropped, because a full pipe would stop the command.
                if bytes_left < 0:
                    time.sleep(_PAUSE_S)
                    continue
                bytes_left -= len(text)
                # A negative `bytes_left` cuts that number of bytes off the end.
                logs[descriptor].write(text if bytes_left >= 0 else text[:bytes_left] + _OUTPUT_CUT)
                logs[descriptor].flush()
        self._process.stdout.close()
        self._process.stderr.close()


def _read_value(line: str) -> Any:
    """Return the reward in a line of output, still unchecked; None if the line has none."""
    with suppress(ValueError, RecursionError):
        parsed = json.loads(line)
        if isinstance(parsed, dict):
            return parsed.get("reward")
        if isinstance(parsed, int | float) and not isinstance(parsed, bool):
            return parsed
    return None
