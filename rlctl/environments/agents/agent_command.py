"""An agent that is a command: started once a rollout below supervisors of its own, and ended with all that it started.

A mark in the environment would not find all processes: `env -i` and setproctitle remove it (workers/supervisor.py).
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
# Seconds for the rest of a command's output, once it has ended.
_OUTPUT_S = 1.0
# Bytes of a command's output that reach the log. Further output is read with pauses: a flood must cost no processor.
MAX_OUTPUT = 1 << 20
_READ_BYTES = 1 << 16
_PAUSE_S = 0.01
# Bytes of its last line that are read.
_MAX_LINE = 1 << 16
_OUTPUT_CUT = b"\n[the agent printed more than 1 MiB: the rest is left out]\n"
# Shells report a program that a signal ended by this number and the signal's.
_BY_SIGNAL = 128


def start_command(command: list[str], call: AgentLaunch) -> Callable[[], None]:
    """Start a command in a session of its own. Return a function that stops the command and its children.

    The last line of its output is its value, if that is JSON: a number, or an object with `reward`. `call.on_end` is
    called once its processes are gone.
    """
    variables = {
        **os.environ,
        "OPENAI_BASE_URL": call.base_url,
        "OPENAI_API_KEY": call.api_key,
        "ANTHROPIC_BASE_URL": call.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": call.api_key,
        "RLCTL_BASE_URL": call.base_url,
        "RLCTL_API_KEY": call.api_key,
        "RLCTL_TASK": json.dumps(asdict(call.task), default=str),
        "RLCTL_SEED": str(call.generator.getrandbits(31)),
        # Without these variables the agents call home, or change their requests with each one.
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    try:
        process, connection = _begin_supervised(command, variables)
    except OSError as error:
        call.loop.call_soon(call.on_end, _start_failure(command, call, error.errno))
        return lambda: None
    return _Command(command, process, connection, call).stop


def _begin_supervised(command: list[str], variables: dict[str, str]) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start a command below supervisors. Returns the outer one, and a connection for the error number of a start."""
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
    return Path(command[-1] if len(command) == 1 else command[0]).name


def _start_failure(command: list[str], call: AgentLaunch, number: int | None) -> EnvironmentFailure:
    """Return the failure of a command that the system refused to start with this error number."""
    error = OSError(number, os.strerror(number or 0), command[0])
    task = json.dumps(asdict(call.task), default=str)
    detail = str(error)
    if number == errno.E2BIG:
        detail += f": RLCTL_TASK has {len(task):,} characters"
    return EnvironmentFailure("raised", f"{_name_of(command)} {NOT_STARTED}", detail)


class _Command:
    """One command that runs. connection: gets an error number if it cannot be started."""

    def __init__(
        self, command: list[str], process: "subprocess.Popen[bytes]", connection: socket.socket, call: AgentLaunch
    ) -> None:
        self._command = command
        self._process = process
        self._connection = connection
        self._call = call
        # End of the command's output.
        self._tail = b""
        self._reader = threading.Thread(target=self._pass_output, name="agent's output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name="agent's end", daemon=True).start()

    def stop(self) -> None:
        """Ask the command's processes to end, and end them later. Called on the loop."""
        assert self._process.stdin
        with suppress(OSError, ValueError):  # the command has ended
            self._process.stdin.write(b".")
        self._call.loop.call_later(TERM_S, self._process.stdin.close)

    def _watch(self) -> None:
        code = self._process.wait()
        self._reader.join(_OUTPUT_S)
        with suppress(RuntimeError):  # the process is about to end
            self._call.loop.call_soon_threadsafe(self._tell_end, code)

    def _tell_end(self, code: int) -> None:
        """Tell how the command ended. Called on the loop, like `stop`, which must not write to a closed descriptor."""
        assert self._process.stdin
        self._process.stdin.close()
        with self._connection:
            self._connection.setblocking(False)
            with suppress(BlockingIOError):
                if error_number := self._connection.recv(_READ_BYTES):
                    self._call.on_end(_start_failure(self._command, self._call, int(error_number)))
                    return
        last_line = self._tail.rstrip().rpartition(b"\n")[2].decode(errors="replace").strip()
        outcome: Any = _read_value(last_line)
        if code:
            # A supervisor that was killed itself has a negative code.
            number = -code if code < 0 else code - _BY_SIGNAL
            # Other codes above 128 are exits: ssh and `sys.exit(-1)` exit with 255.
            ending = f"was ended by signal {number}" if number in signal.valid_signals() else f"exited with {code}"
            outcome = EnvironmentFailure("raised", f"{_name_of(self._command)} {ending}", shorten_text(last_line))
        self._call.on_end(outcome)

    def _pass_output(self) -> None:
        """Pass the command's output on to the log, up to a bound, and keep the last line."""
        assert self._process.stdout and self._process.stderr
        output = self._process.stdout.fileno()
        errors = self._process.stderr.fileno()
        logs = {output: sys.stdout.buffer, errors: sys.stderr.buffer}
        room = MAX_OUTPUT
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
                if room < 0:
                    time.sleep(_PAUSE_S)
                    continue
                room -= len(text)
                logs[descriptor].write(text if room >= 0 else text[:room] + _OUTPUT_CUT)
                logs[descriptor].flush()
        self._process.stdout.close()
        self._process.stderr.close()


def _read_value(line: str) -> Any:
    """Return the value in a line; None for a line without a value."""
    with suppress(ValueError, RecursionError):
        parsed = json.loads(line)
        if isinstance(parsed, dict):
            return parsed.get("reward")
        if isinstance(parsed, int | float) and not isinstance(parsed, bool):
            return parsed
    return None
