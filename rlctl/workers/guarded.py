"""The handle of a process that runs code which may hang, fork or crash: it starts, looks at and ends it."""

import os
import signal
import socket
import subprocess
import sys

from rlctl.workers.channel import Channel

ENDING_TIMEOUT_S = 10.0


class GuardedProcess:
    """One process below a keeper, see keeper.py.

    module: the program. max_reply: bytes of a reply. output: descriptor for what it prints; None: the standard error.
    """

    def __init__(self, module: str, max_reply: int, output: int | None) -> None:
        self._module, self._max_reply, self._output = module, max_reply, output
        # Taken now: while Ray starts, this process has Ray's, and whoever has that ends with Ray's folder.
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the keeper."""
        return self._process.pid if self._process else None

    def ready(self) -> Channel | None:
        """Return the channel to a process that runs and has said nothing unasked; None after ending any other."""
        if self._process is None or self._channel is None:
            return None
        if self._process.poll() is None and self._channel.is_quiet():
            return self._channel
        self.stop()
        return None

    def start(self) -> Channel:
        """Start it, and return the channel to it."""
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours, self._max_reply)
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=2 if self._output is None else self._output,
            stderr=self._output,
            env=self._environment,
            start_new_session=True,
        )
        theirs.close()
        return self._channel

    def stop(self) -> None:
        """End the process, and whatever it started."""
        if self._process is not None:
            assert self._process.stdin
            self._process.stdin.close()
            try:
                self._process.wait(ENDING_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._channel is not None:
            self._channel.close()
        self._process = self._channel = None

    def ending(self) -> str:
        """Return how it ended, in words, after ending what is left of it."""
        assert self._process is not None
        try:
            code = self._process.wait(ENDING_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        finally:
            self.stop()
        try:
            return signal.Signals(code - 128).name
        except ValueError:
            return f"exit code {code}"
