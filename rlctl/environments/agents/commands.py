"""An agent that is a command: started once a rollout, and ended with all that it started."""

import errno
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlctl.environments.agents.episode import AgentLaunch
from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.utils.user_code import shortened

# Seconds between SIGTERM and SIGKILL for a command's processes.
TERM_S = 2.0
# Seconds for the rest of its output, once it has ended.
_OUTPUT_S = 1.0
# Bytes of its output that reach the log. Beyond, it is read with pauses, so that a flood costs no processor.
MAX_OUTPUT, _READ, _PAUSE_S = 1 << 20, 1 << 16, 0.01
# Bytes of its last line that are looked at.
_MAX_LINE = 1 << 16
_LEFT_OUT = b"\n[the agent printed more than 1 MiB: the rest is left out]\n"
# Rounds of looking for processes that left its session.
_ROUNDS = 20


def start_command(command: list[str], call: AgentLaunch) -> Callable[[], None]:
    """Start a command in its own session. Returns the way to stop it, with all that it started.

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
    name = Path(command[-1] if len(command) == 1 else command[0]).name
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        long = f": RLCTL_TASK has {len(own['RLCTL_TASK']):,} characters" if error.errno == errno.E2BIG else ""
        failure = EnvironmentFailure("raised", f"{name} cannot be started", f"{error}{long}")
        call.loop.call_soon(call.ended, failure)
        return lambda: None
    return _Command(name, process, call).stop


class _Command:
    """One command that runs."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", call: AgentLaunch) -> None:
        self._name, self._process, self._call = name, process, call
        # End of its output.
        self._tail = b""
        # Held while it is reaped: its number may be another's then.
        self._lock, self._reaped = threading.Lock(), False
        self._reader = threading.Thread(target=self._pass_on, name="agent's output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name="agent's end", daemon=True).start()

    def stop(self) -> None:
        """Ask its processes to end, and end them later. Called on the loop."""
        if self._signal(signal.SIGTERM):
            self._call.loop.call_later(TERM_S, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> bool:
        """Send a signal to its group, whose leader may have ended before its children; return False if it is gone."""
        with self._lock, suppress(OSError):
            if not self._reaped:
                os.killpg(self._process.pid, number)
                return True
        return False

    def _watch(self) -> None:
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._signal(signal.SIGKILL)
        self._reader.join(_OUTPUT_S)
        with self._lock:
            code, self._reaped = self._process.wait(), True
        # The key is in the environment of its processes alone.
        _end_orphans(self._call.api_key)
        self._reader.join(_OUTPUT_S)
        last = self._tail.rstrip().rpartition(b"\n")[2].decode(errors="replace").strip()
        outcome: Any = _value(last)
        if code:
            how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
            outcome = EnvironmentFailure("raised", f"{self._name} {how}", shortened(last))
        with suppress(RuntimeError):  # the process is about to end
            self._call.loop.call_soon_threadsafe(self._call.ended, outcome)

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
                logs[descriptor].write(data if left >= 0 else data[:left] + _LEFT_OUT)
                logs[descriptor].flush()
        self._process.stdout.close()
        self._process.stderr.close()


def _end_orphans(secret: str) -> None:
    """End the processes of a command that left its session. The supervisor adopted them."""
    wanted = f"RLCTL_API_KEY={secret}".encode()
    for _ in range(_ROUNDS):
        found = [pid for pid in _children(os.getppid()) if _has(pid, wanted)]
        if not found:
            return
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        # Their own children are adopted in turn.
        time.sleep(_PAUSE_S)


def _children(pid: int) -> list[int]:
    """Return the children of a process; none if the kernel lists none."""
    try:
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _words(task / "children")]
    except OSError:
        return []


def _words(file: Path) -> list[str]:
    return file.read_text().split()


def _has(pid: int, variable: bytes) -> bool:
    """Return True if a process began with this variable. It is another's, or gone, if it cannot be read."""
    try:
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _value(line: str) -> Any:
    """Return the value in a line; None if it has none."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found.get("reward")
        if isinstance(found, int | float) and not isinstance(found, bool):
            return found
    return None
