"""An agent that is a command: started once a rollout below supervisors of its own, and ended with all that it started.

A mark in the environment would not find all: `env -i` and setproctitle remove it (workers/supervisor.py).
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
from rlctl.utils.user_code import shortened
from rlctl.workers import supervisor

# Seconds between SIGTERM and SIGKILL for a command's processes.
TERM_S = 2.0
# Seconds for the rest of its output, once it has ended.
_OUTPUT_S = 1.0
# Bytes of its output that reach the log. Beyond, it is read with pauses, so that a flood costs no processor.
MAX_OUTPUT, _READ, _PAUSE_S = 1 << 20, 1 << 16, 0.01
# Bytes of its last line that are looked at.
_MAX_LINE = 1 << 16
_OUTPUT_CUT = b"\n[the agent printed more than 1 MiB: the rest is left out]\n"
# Shells report a program that a signal ended by this number and the signal's.
_BY_SIGNAL = 128


def start_command(command: list[str], call: AgentLaunch) -> Callable[[], None]:
    """Start a command in a session of its own. Returns the way to stop it, with all that it started.

    The last line of its output is its value, if it is JSON: a number, or an object with `reward`. `call.ended` is
    called once its processes are gone.
    """
    own = {
        "OPENAI_BASE_URL": call.base_url,
        "OPENAI_API_KEY": call.api_key,
        "ANTHROPIC_BASE_URL": call.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": call.api_key,
        "RLCTL_BASE_URL": call.base_url,
        "RLCTL_API_KEY": call.api_key,
        "RLCTL_TASK": json.dumps(asdict(call.task), default=str),
        "RLCTL_SEED": str(call.generator.getrandbits(31)),
        # These call home, or change their requests with each one, otherwise.
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    try:
        process, connection = _begin_supervised(command, {**os.environ, **own})
    except OSError as error:
        call.loop.call_soon(call.ended, _not_started(command, call, error.errno))
        return lambda: None
    return _Command(command, process, connection, call).stop


def _begin_supervised(command: list[str], variables: dict[str, str]) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start a command below supervisors. Returns the outer one, and a connection for the error number of a start."""
    connection, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, str(theirs.fileno()), *command],
                env=variables,
                pass_fds=[theirs.fileno()],
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


def _not_started(command: list[str], call: AgentLaunch, number: int | None) -> EnvironmentFailure:
    """Return the failure of a command that the system refused to start with this error number."""
    error = OSError(number, os.strerror(number or 0), command[0])
    task = json.dumps(asdict(call.task), default=str)
    long = f": RLCTL_TASK has {len(task):,} characters" if number == errno.E2BIG else ""
    return EnvironmentFailure("raised", f"{_name_of(command)} {NOT_STARTED}", f"{error}{long}")


class _Command:
    """One command that runs. connection: gets an error number if it cannot be started."""

    def __init__(
        self, command: list[str], process: "subprocess.Popen[bytes]", connection: socket.socket, call: AgentLaunch
    ) -> None:
        self._command = command
        self._process = process
        self._connection = connection
        self._call = call
        # End of its output.
        self._tail = b""
        self._reader = threading.Thread(target=self._pass_on, name="agent's output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name="agent's end", daemon=True).start()

    def stop(self) -> None:
        """Ask its processes to end, and end them later. Called on the loop."""
        assert self._process.stdin
        with suppress(OSError, ValueError):  # it has ended
            self._process.stdin.write(b".")
        self._call.loop.call_later(TERM_S, self._process.stdin.close)

    def _watch(self) -> None:
        code = self._process.wait()
        self._reader.join(_OUTPUT_S)
        with suppress(RuntimeError):  # the process is about to end
            self._call.loop.call_soon_threadsafe(self._tell_end, code)

    def _tell_end(self, code: int) -> None:
        """Tell how it ended. Called on the loop, as is `stop`, so that no descriptor is closed while it is written."""
        assert self._process.stdin
        self._process.stdin.close()
        with self._connection:
            self._connection.setblocking(False)
            with suppress(BlockingIOError):
                if number := self._connection.recv(_READ):
                    self._call.ended(_not_started(self._command, self._call, int(number)))
                    return
        last = self._tail.rstrip().rpartition(b"\n")[2].decode(errors="replace").strip()
        outcome: Any = _line_value(last)
        if code:
            # A negative one is of a supervisor that was killed itself.
            by = -code if code < 0 else code - _BY_SIGNAL
            # Other codes above 128 are exits: 255 is that of ssh, and of `sys.exit(-1)`.
            how = f"was ended by signal {by}" if by in signal.valid_signals() else f"exited with {code}"
            outcome = EnvironmentFailure("raised", f"{_name_of(self._command)} {how}", shortened(last))
        self._call.ended(outcome)

    def _pass_on(self) -> None:
        """Pass its output on to the log, up to a bound, and keep the last line."""
        assert self._process.stdout and self._process.stderr
        own, others = self._process.stdout.fileno(), self._process.stderr.fileno()
        poll, left = select.poll(), MAX_OUTPUT
        logs = {own: sys.stdout.buffer, others: sys.stderr.buffer}
        for descriptor in logs:
            poll.register(descriptor)
        while logs:
            for descriptor, _ in poll.poll():
                data = os.read(descriptor, _READ)
                if not data:
                    poll.unregister(descriptor)
                    del logs[descriptor]
                    continue
                if descriptor == own:
                    self._tail = (self._tail + data)[-_MAX_LINE:]
                if left < 0:
                    time.sleep(_PAUSE_S)
                    continue
                left -= len(data)
                logs[descriptor].write(data if left >= 0 else data[:left] + _OUTPUT_CUT)
                logs[descriptor].flush()
        self._process.stdout.close()
        self._process.stderr.close()


def _line_value(line: str) -> Any:
    """Return the value in a line; None if it has none."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found.get("reward")
        if isinstance(found, int | float) and not isinstance(found, bool):
            return found
    return None
