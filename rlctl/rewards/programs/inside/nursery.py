"""Processes of programs: a clean one that forks a candidate for each run, and the judge's watch over a candidate.

CPU time decides. A process that neither computes nor waits for a core sleeps. Sleep has another limit.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import time
from typing import Any

from rlctl.rewards.programs.inside import candidate

# prctl of Linux.
_SET_DUMPABLE = 4
_SET_CHILD_SUBREAPER = 36
_TRACES_OTHERS = 1 << 19  # CAP_SYS_PTRACE
_DROP_FROM_BOUNDING_SET = 24
_SET_NO_NEW_PRIVILEGES = 38
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = 63
# Seconds between two looks at a candidate's clock.
_LOOK_S = 0.02
# Longest wait for the end of a process that got SIGKILL, seconds.
_END_S = 5.0
# Longest wait for a fork, seconds, also on a busy machine.
_FORK_S = 30.0
MAX_ANSWER = 16 << 20


class EndedError(Exception):
    """An ended candidate. The text is the reason: a limit, or `lost` if it ended by itself."""


def protect_process() -> None:
    """Close this process's memory and files to others of its user, and adopt orphans of its children."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    library.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def may_trace_others() -> bool:
    """Return True if this process may read the memory of any other one."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) & _TRACES_OTHERS)
    return False


def _drop_capabilities() -> None:
    """Give up root's powers over other processes, for this process and those that it starts."""
    library = ctypes.CDLL(None, use_errno=True)
    for capability in range(_LAST_CAPABILITY + 1):
        library.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
    library.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    library.capset(header, none)


class Nursery:
    """The clean process. It is forked before the tests are read, and has neither input nor output of the sandbox."""

    def __init__(self) -> None:
        self._channel, other_end = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._channel.close()
            _run_nursery(other_end)
        other_end.close()
        self.is_safe = self._channel.recv(1) == b"+"
        # A program may have stopped the nursery.
        self._channel.settimeout(_FORK_S)

    def fork(self, setup: dict[str, Any], descriptors: list[int]) -> int:
        """Fork a candidate with these descriptors; return its process id. Raises EndedError if the nursery is lost."""
        try:
            text = json.dumps(setup).encode()
            socket.send_fds(self._channel, [struct.pack("I", len(text))], descriptors)
            self._channel.sendall(text)
            answer = self._channel.recv(4)
        except OSError as error:
            raise EndedError("lost") from error
        if len(answer) < 4:
            raise EndedError("lost")
        return int(struct.unpack("I", answer)[0])

    def end_orphans(self) -> bool:
        """End the processes that candidates left. Return True if there was one."""
        has_orphans = False
        for _ in range(100):
            children = _list_children()
            orphans = [pid for pid in children if pid != self.pid]
            for pid in orphans:
                if not _is_zombie(pid):
                    has_orphans = True
                    _signal(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if not orphans:
                break
            time.sleep(0.002)
        return has_orphans


def _run_nursery(channel: socket.socket) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    _drop_capabilities()
    channel.sendall(b"-" if may_trace_others() else b"+")
    # Candidates are reaped by the kernel.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        head, descriptors, _, _ = socket.recv_fds(channel, 4, 4)
        if len(head) < 4:
            os._exit(0)
        length = struct.unpack("I", head)[0]
        text = b""
        while len(text) < length:
            text += channel.recv(length - len(text))
        setup = json.loads(text)
        pid = os.fork()
        if pid == 0:
            try:
                channel.close()
                os.setsid()
                for target, descriptor in enumerate(descriptors[1:]):
                    os.dup2(descriptor, target)
                    os.close(descriptor)
                candidate.run_candidate(setup, socket.socket(fileno=descriptors[0]))
            finally:
                candidate.end_process()
        for descriptor in descriptors:
            os.close(descriptor)
        channel.sendall(struct.pack("I", pid))


class Watch:
    """One candidate, its limits and its clock. cpu_s and idle_s are of each test."""

    def __init__(self, pid: int, channel: socket.socket, cpu_s: float, idle_s: float) -> None:
        self.pid = pid
        self._channel = channel
        self._cpu_limit_s = cpu_s
        self._idle_limit_s = idle_s
        self._unread = b""
        self.has_ended = False
        self.most_cpu_s = 0.0
        self.begin_test()

    def begin_test(self) -> None:
        """Begin the budget of a test."""
        self._begin_cpu_s = self.read_cpu()
        self._begin_busy_s = _read_busy(self.pid)
        self._begin_s = time.monotonic()

    def end_test(self) -> None:
        """Note the test's CPU time."""
        self.most_cpu_s = max(self.most_cpu_s, self.read_cpu() - self._begin_cpu_s)

    def read_cpu(self) -> float:
        """Return the CPU time of all threads, seconds; 0 for an ended process."""
        try:
            return time.clock_gettime((~self.pid << 3) | 2)
        except OSError:
            return 0.0

    def check(self) -> None:
        """End the candidate if it is over a limit. Raises EndedError."""
        cpu_s = self.read_cpu() - self._begin_cpu_s
        self.most_cpu_s = max(self.most_cpu_s, cpu_s)
        if cpu_s > self._cpu_limit_s:
            self.end()
            raise EndedError("cpu")
        wall_s = time.monotonic() - self._begin_s
        # Waiting for a core is no sleep.
        busy_s = max(cpu_s, _read_busy(self.pid) - self._begin_busy_s)
        if wall_s - busy_s > self._idle_limit_s:
            self.end()
            raise EndedError("wall")

    def read_until(self, descriptor: int, limit: int) -> bytes:
        """Read a descriptor to its end. Raises EndedError for a limit."""
        parts: list[bytes] = []
        size = 0
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        while True:
            while not poll.poll(_LOOK_S * 1000):
                self.check()
            part = os.read(descriptor, 1 << 16)
            if not part:
                return b"".join(parts)
            parts.append(part)
            size += len(part)
            if size > limit:
                self.end()
                raise EndedError("output")
            self.check()

    def ask(self, request: Any) -> Any:
        """Send a request and return the answer, which is hostile JSON. Raises EndedError."""
        text = json.dumps(request).encode() + b"\n"
        sent = 0
        self._channel.setblocking(False)
        poll = select.poll()
        poll.register(self._channel, select.POLLOUT)
        while sent < len(text):
            while not poll.poll(_LOOK_S * 1000):
                self.check()
            try:
                sent += self._channel.send(text[sent : sent + (1 << 16)])
            except OSError as error:
                self._lose(error)
        return self._read_answer()

    def read_report(self) -> Any:
        """Return the report of a program that ended, or None if there is none."""
        try:
            return self._read_answer()
        except EndedError:
            return None

    def end(self) -> None:
        """End the candidate and its process group."""
        if not self.has_ended:
            self.has_ended = True
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            _signal(self.pid, signal.SIGKILL)
            self._channel.close()
            # From then on its children are the judge's, and `end_orphans` sees them.
            deadline = time.monotonic() + _END_S
            while not _is_zombie(self.pid) and time.monotonic() < deadline:
                time.sleep(0.001)

    def _read_answer(self) -> Any:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._unread:
            while not poll.poll(_LOOK_S * 1000):
                self.check()
            try:
                part = self._channel.recv(1 << 16)
            except OSError as error:
                self._lose(error)
            if not part:
                self._lose(None)
            self._unread += part
            if len(self._unread) > MAX_ANSWER:
                self.end()
                raise EndedError("output")
        line, _, self._unread = self._unread.partition(b"\n")
        # A stream of answers that nobody asked for has its budget too.
        self.check()
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return {"raised": [["ValueError", "Exception", "BaseException"], "an answer that is no JSON", 0]}

    def _lose(self, error: OSError | None) -> None:
        self.end()
        raise EndedError("lost") from error


def _read_busy(pid: int) -> float:
    """Return the seconds for which the main thread computed or waited for a core; 0 if the kernel does not say it."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            computed, waited, _ = file.read().split()
    except (OSError, ValueError):
        return 0.0
    return (int(computed) + int(waited)) / 1e9


def _list_children() -> list[int]:
    pid = os.getpid()
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)
