"""What user rewards print: in a file, up to a bound, however much they print."""

import os
import threading
from pathlib import Path

from rlctl.rewards.failures import Emit

# Of an attempt. A line a rollout would fill a disk in the weeks that a run may take.
MAX_LOG_BYTES = 4 << 20
_READ_BYTES = 1 << 16
# A process out of a reward's reach may hold the pipe open for ever.
_ENDING_S = 2.0


class OutputLog:
    """A pipe to a file, whose writing end reward processes have as their output. Close it after they have ended.

    descriptor: the writing end. emit: writes the event that says that the bound was reached.
    """

    def __init__(self, path: Path, emit: Emit | None) -> None:
        self._path, self._emit = path, emit
        self._reading, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._copy, name="rewards-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for what was printed last."""
        os.close(self.descriptor)
        self._thread.join(_ENDING_S)

    def _copy(self) -> None:
        left = MAX_LOG_BYTES
        while data := os.read(self._reading, _READ_BYTES):
            # What is beyond the bound is read all the same: who prints must never wait.
            if left >= 0:
                self._append(data[:left])
                left -= len(data)
                if left < 0:
                    self._tell()
        os.close(self._reading)

    def _tell(self) -> None:
        bound = f"{MAX_LOG_BYTES / 2**20:g} MiB"
        self._append(f"\n[rewards printed more than {bound}: the rest is left out]\n".encode())
        if self._emit:
            self._emit("warning", what=f"rewards printed more than {bound}: {self._path.name} has no more of it")

    def _append(self, data: bytes) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(data)
        except OSError:  # a full disk must not end scoring
            return
