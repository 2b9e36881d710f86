"""The parent's side of a child process that runs a user's code, which may hang, fork or crash.

Requests are pickled; rlctl's code in the child reads them. Replies are lines of JSON of bounded length. They are never
unpickled, because they come from a process that runs the user's code. The caller checks that a reply answers its
request.
"""

import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

ENDING_TIMEOUT_S = 10.0


class BadReply(Exception):
    """The child sent bytes that are no reply."""


class Channel:
    """The parent's end of the connection to the child. Each method that waits raises TimeoutError after its deadline.

    If the child has closed the connection, methods raise EOFError or ConnectionError. max_reply: the most bytes of a
    reply.
    """

    def __init__(self, connection: socket.socket, max_reply: int) -> None:
        self._connection = connection
        self._max_reply = max_reply
        self._buffer = b""

    def send(self, message: Any, timeout_s: float) -> None:
        self._connection.settimeout(timeout_s)
        self._connection.sendall(pickle.dumps(message))

    def reply(self, timeout_s: float) -> dict[str, Any]:
        """Return the next reply. Raises BadReply for a line that is no reply."""
        try:
            message = json.loads(self._read_line(time.monotonic() + timeout_s))
        except (ValueError, RecursionError) as error:  # RecursionError: a reply that is nested too deep
            raise BadReply(str(error)) from error
        if not isinstance(message, dict):
            raise BadReply("a reply is a JSON object")
        return message

    def is_quiet(self) -> bool:
        """Return True if the connection is open and there is no unread output of the child."""
        poll = select.poll()  # unlike select, it takes descriptors above 1023
        poll.register(self._connection, select.POLLIN)
        return not self._buffer and not poll.poll(0)

    def close(self) -> None:
        self._connection.close()

    def _read_line(self, end: float) -> bytes:
        """Return the next line. end: deadline by time.monotonic."""
        while b"\n" not in self._buffer:
            if len(self._buffer) > self._max_reply:
                raise BadReply(f"more than {self._max_reply} bytes without an end")
            self._connection.settimeout(max(1e-3, end - time.monotonic()))
            part = self._connection.recv(1 << 16)
            if not part:
                raise EOFError
            self._buffer += part
            # `recv` has its own timeout. This is for a child that sends a little each time.
            if b"\n" not in self._buffer and time.monotonic() > end:
                raise TimeoutError
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


class GuardedProcess:
    """One child process below two supervisors (supervisor.py).

    module: the process runs `python -m MODULE`. max_reply: the most bytes of a reply. output: descriptor for the
    process's stdout and stderr; None: this process's stderr. variables: environment of the process; None: a copy of
    this process's.
    """

    def __init__(
        self, module: str, max_reply: int, output: int | None, variables: Mapping[str, str] | None = None
    ) -> None:
        self._module = module
        self._max_reply = max_reply
        self._output = output
        # Copied now, because this process has Ray's environment while Ray starts, and a child with that environment
        # would be killed when Ray's folder is removed.
        self._environment = {**(os.environ if variables is None else variables), "OMP_NUM_THREADS": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the outer supervisor."""
        return self._process.pid if self._process else None

    def ready(self) -> Channel | None:
        """Return the channel if the process runs and its channel is quiet. Otherwise stop the process; return None."""
        if self._process is None or self._channel is None:
            return None
        if self._process.poll() is None and self._channel.is_quiet():
            return self._channel
        self.stop()
        return None

    def start(self) -> Channel:
        """Start the process, and return its channel."""
        self._channel = Channel(self.launch(), self._max_reply)
        return self._channel

    def launch(self) -> socket.socket:
        """Start the process and return its socket, for a caller that does not use `Channel`."""
        parent_end, child_end = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module, str(child_end.fileno())],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.PIPE,
            stdout=2 if self._output is None else self._output,
            stderr=self._output,
            env=self._environment,
            start_new_session=True,
        )
        child_end.close()
        return parent_end

    def stop(self) -> None:
        """End the process and all of its descendants. Its supervisors end the descendants (supervisor.py)."""
        if self._process is not None:
            assert self._process.stdin
            # At this the outer supervisor, which is `_process`, ends all descendants and exits.
            self._process.stdin.close()
            try:
                self._process.wait(ENDING_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                # The inner supervisor notices that the outer one is gone, and ends the descendants.
                self._process.kill()
                self._process.wait()
        if self._channel is not None:
            self._channel.close()
        self._process = self._channel = None

    def ending(self) -> str:
        """Wait for the process to end, stop its descendants, and return a text on how it ended."""
        assert self._process is not None
        try:
            code = self._process.wait(ENDING_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # The process still runs. The caller asks for its ending because the connection was closed.
            return "it closed its connection"
        finally:
            self.stop()
        try:
            # The code is negative if the supervisor itself was killed.
            return signal.Signals(-code if code < 0 else code - 128).name
        except ValueError:
            return f"exit code {code}"
