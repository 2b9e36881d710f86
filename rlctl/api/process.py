"""A call in a separate process (`rlctl/cli/api_process.py`): reads its output and answers, and passes on Ctrl-C."""

import json
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlctl.config.errors import Problem

# Seconds between two calls of `on_look`.
_LOOK_S = 0.2
# Most bytes of one read.
_CHUNK = 1 << 16
_PACKAGE = Path(__file__).resolve().parents[1]


class Call:
    """One call of a function in a separate process, and its answers.

    log: called with each line that the process prints. arguments: the function's arguments as JSON data.
    """

    def __init__(self, function: str, log: Callable[[str], object] | None, **arguments: Any) -> None:
        self._log = log
        # Directory of the run; None before it has one.
        self.run: Path | None = None
        # Problems of the input.
        self.problems: list[Problem] = []
        # Reason of a failure; empty if there was none.
        self.failure = ""
        # Results of an evaluation.
        self.results: list[dict[str, Any]] = []
        # True after Ctrl-C.
        self.is_interrupted = False
        # Last printed line. It is the reason of a failure if no answer gives a reason.
        self.last_line = ""
        # Bytes of an incomplete line of each stream.
        self._rest = {"output": b"", "answers": b""}
        self._call = {"function": function, **arguments}

    def run_to_end(self, on_look: Callable[[], None]) -> int:
        """Run the call to its end, and return the exit code. on_look: called five times a second.

        Each Ctrl-C is passed on. After the first a run finishes its step and saves, after the second it ends at once.
        After an error of `log` or `on_look` the process gets SIGTERM, and the error is raised when it has ended.
        """
        read_end, write_end = os.pipe()
        process = subprocess.Popen(
            # -P (safe path): a file in the working directory cannot hide a module.
            [sys.executable, "-P", "-m", "rlctl.cli.api_process", str(write_end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(),
            pass_fds=[write_end],
            # In a new session Ctrl-C of a terminal reaches only this process, which passes it on once.
            start_new_session=True,
        )
        os.close(write_end)
        assert process.stdin and process.stdout
        try:
            with process.stdin as request:
                request.write(json.dumps(self._call).encode())
            with selectors.DefaultSelector() as streams:
                streams.register(process.stdout, selectors.EVENT_READ, "output")
                streams.register(read_end, selectors.EVENT_READ, "answers")
                self._follow(process, streams, on_look)
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
        finally:
            process.stdout.close()
            os.close(read_end)
        return process.wait()

    def _follow(
        self, process: subprocess.Popen[bytes], streams: selectors.BaseSelector, on_look: Callable[[], None]
    ) -> None:
        """Read the streams until the process has ended and no bytes are left.

        The end of a stream is not awaited: a process that the run left behind may keep the stream open.
        """
        next_look = 0.0
        while True:
            try:
                has_ended = process.poll() is not None
                has_read = self._read_streams(streams, 0.0 if has_ended else _LOOK_S)
                if has_ended and not has_read:
                    break
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + _LOOK_S
                    on_look()
            except KeyboardInterrupt:
                self.is_interrupted = True
                process.send_signal(signal.SIGINT)
        for stream, rest in self._rest.items():
            if rest:
                self._take_line(stream, rest.decode("utf-8", "replace"))
        on_look()

    def _read_streams(self, streams: selectors.BaseSelector, timeout_s: float) -> bool:
        """Read the available bytes, and handle whole lines. Return True if there were any bytes."""
        has_read = False
        # Both streams have ended, the process has not.
        if not streams.get_map():
            time.sleep(timeout_s)
        for key, _ in streams.select(timeout_s):
            content = os.read(key.fd, _CHUNK)
            if not content:
                streams.unregister(key.fileobj)
                continue
            has_read = True
            *lines, self._rest[key.data] = (self._rest[key.data] + content).split(b"\n")
            for line in lines:
                self._take_line(key.data, line.decode("utf-8", "replace"))
        return has_read

    def _take_line(self, stream: str, line: str) -> None:
        if stream == "answers":
            answer = json.loads(line)
            if "run" in answer:
                self.run = Path(answer["run"]).absolute()
            self.problems += [Problem(*texts) for texts in answer.get("problems", [])]
            self.failure = answer.get("failure", self.failure)
            self.results += answer.get("results", [])
            return
        self.last_line = line or self.last_line
        if self._log is not None:
            self._log(line)


def _environment() -> dict[str, str]:
    """Return environment variables with which the process imports the same rlctl as this one, also a source tree."""
    tree = str(_PACKAGE.parent)
    paths = [] if tree in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")) else [tree]
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)} if paths else dict(os.environ)
