"""One run of a confined command: its pipes, the limits that the kernel does not hold, and its end."""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlctl.sandbox.base import Ending, Limits, SandboxError
from rlctl.sandbox.process_tree import CONFINED, TreeUsage, is_running, read_tree

# Seconds between two measurements of memory, CPU time and processes.
TICK_S = 0.05
# Measurements between two of the files' size, which is slower.
_TICKS_PER_FILES = 4
_ENDING_S = 15.0
_MOST_PAUSES = 20
# Seconds in which signalled processes stop.
_PAUSE_S = 0.0003
_CHUNK = 1 << 16
# Word of a command that stands for the descriptor of the program's standard input. The command's own is then a pipe,
# whose end asks it to stop.
STDIN = "{stdin}"


@dataclass(frozen=True)
class ConfinedCommand:
    """Command that runs a program below a keeper, in the way of one implementation."""

    argv: Sequence[str]
    variables: dict[str, str]
    # Return the process id of the keeper, given the started process's; None until it runs.
    find_keeper: Callable[[int], int | None]
    # End the program and all of its descendants.
    stop: Callable[["subprocess.Popen[bytes]"], None]
    # Return True if the program's files are beyond their limit.
    exceeds_files: Callable[[], bool]
    # Descriptors that the command inherits, besides its three standard ones.
    descriptors: Sequence[int] = ()


@dataclass
class LimitedRun:
    """Outcome of a confined command."""

    # Limit at which it was ended; None: it ended by itself.
    limit: Ending | None = None
    # Exit status of the command; negative: the signal that ended it.
    status: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    is_cut: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_bytes: int = 0


def run_limited(command: ConfinedCommand, stdin: bytes, limits: Limits) -> LimitedRun:
    """Run a command until it ends or is ended at a limit. Raises SandboxError if it cannot be started or ended."""
    return Supervision(command, stdin, limits).run()


class Supervision:
    """A started command with its pipes. keeps_input: more may be sent to the standard input later."""

    def __init__(self, command: ConfinedCommand, stdin: bytes, limits: Limits, *, keeps_input: bool = False) -> None:
        self._command = command
        self._limits = limits
        self._unsent = memoryview(stdin)
        self._keeps_input = keeps_input
        self._outputs: dict[int, bytearray] = {}
        self._run = LimitedRun()
        self._keeper: int | None = None
        self._ticks = 0
        self._start = time.monotonic()
        self._next_tick = self._start + TICK_S
        # CPU time before the present request.
        self._cpu_before_s = 0.0
        self._deadline: float | None = None
        self._process, self._stdin, self._stdout, self._stderr = _start_command(command)
        self._poll = select.poll()
        for descriptor in (self._stdout, self._stderr):
            self._outputs[descriptor] = bytearray()
            os.set_blocking(descriptor, False)
            self._poll.register(descriptor, select.POLLIN)
        os.set_blocking(self._stdin, False)
        self._end = os.pidfd_open(self._process.pid)
        self._poll.register(self._end, select.POLLIN)
        self._send_input()

    def run(self) -> LimitedRun:
        """Serve the pipes and measure, until the command has ended."""
        try:
            while self.step():
                pass
            return self.finish()
        finally:
            self.close()

    def step(self) -> bool:
        """Serve the pipes and measure once; return True if the command runs. Raises SandboxError if it cannot end."""
        wait_s = max(0.0, self._next_tick - time.monotonic())
        ready = [descriptor for descriptor, _ in self._poll.poll(wait_s * 1000)]
        if self._end in ready:
            return False
        self._serve_pipes(ready)
        now = time.monotonic()
        if now >= self._next_tick:
            self._measure(now)
            self._next_tick = now + TICK_S
        if self._run.limit is not None:
            self._deadline = self._deadline or now + _ENDING_S
            if now > self._deadline:
                raise SandboxError(f"its processes live {_ENDING_S:g} s after their end was ordered")
        return True

    def send(self, request: bytes) -> None:
        """Begin a request: the limits on time and output count from now on."""
        self.resume()
        self._start = time.monotonic()
        self._next_tick = self._start + TICK_S
        self._cpu_before_s = self._run.cpu_s
        if self._keeper is not None:
            self._cpu_before_s = read_tree(self._keeper).cpu_s
        for output in self._outputs.values():
            output.clear()
        self._unsent = memoryview(bytes(self._unsent) + request)
        self._send_input()

    def take_line(self) -> bytes | None:
        """Return the next line of the output; None if it is not there yet."""
        line, newline, rest = self._outputs[self._stdout].partition(b"\n")
        if not newline:
            return None
        self._outputs[self._stdout] = bytearray(rest)
        return bytes(line)

    def pause(self) -> None:
        """Stop all processes until the next request. They are signalled again while one was not seen to stop."""
        if self._keeper is None:
            self._keeper = self._command.find_keeper(self._process.pid)
        if self._keeper is None:
            return
        for _ in range(_MOST_PAUSES):
            running_pids = [pid for pid in read_tree(self._keeper).pids if is_running(pid)]
            if not running_pids:
                return
            for pid in running_pids:
                send_signal(pid, signal.SIGSTOP)
            time.sleep(_PAUSE_S)

    def resume(self) -> None:
        """Let all processes go on."""
        if self._keeper is not None:
            for pid in read_tree(self._keeper).pids:
                send_signal(pid, signal.SIGCONT)

    def _serve_pipes(self, ready: Sequence[int]) -> None:
        """Send and receive on the pipes that are ready."""
        for descriptor in ready:
            if descriptor == self._stdin:
                self._send_input()
            elif descriptor in self._outputs:
                self._receive(descriptor)

    def _send_input(self) -> None:
        """Send as much of the standard input as the pipe takes; close it at the end."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._stdin, self._unsent[:_CHUNK]) :]
        except BlockingIOError:
            self._poll.register(self._stdin, select.POLLOUT)
            return
        except OSError:
            # The program has closed its standard input.
            self._unsent = memoryview(b"")
        with contextlib.suppress(KeyError):
            self._poll.unregister(self._stdin)
        if not self._keeps_input:
            os.close(self._stdin)
            self._stdin = -1

    def _receive(self, descriptor: int) -> None:
        """Read the output that is there. End the program if it is too much."""
        free_bytes = self._limits.output_bytes - sum(map(len, self._outputs.values()))
        while True:
            try:
                part = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                return
            if not part:
                self._poll.unregister(descriptor)
                return
            self._outputs[descriptor] += part[:free_bytes]
            if len(part) > free_bytes:
                self._run.is_cut = True
                self._end_at(Ending.OUTPUT)
                return
            free_bytes -= len(part)

    def _measure(self, now: float) -> None:
        """Compare the program's use with its limits. End the program beyond one."""
        self._ticks += 1
        if self._keeper is None:
            self._keeper = self._command.find_keeper(self._process.pid)
        if self._keeper is not None:
            usage = read_tree(self._keeper)
            self._run.cpu_s = max(self._run.cpu_s, usage.cpu_s)
            if usage.tasks > self._limits.processes:
                self._end_at(Ending.PROCESSES)
            elif self._exceeds_memory(usage):
                self._end_at(Ending.MEMORY)
            elif usage.cpu_s - self._cpu_before_s > self._limits.cpu_s:
                self._end_at(Ending.CPU_TIME)
        if now - self._start > self._limits.wall_s:
            self._end_at(Ending.WALL_TIME)
        elif self._ticks % _TICKS_PER_FILES == 0 and self._command.exceeds_files():
            self._end_at(Ending.FILES)

    def _exceeds_memory(self, usage: TreeUsage) -> bool:
        """Return True if the program uses too much memory. Shared pages are told apart only near the limit."""
        most_bytes = self._limits.memory_mib << 20
        used_bytes = usage.resident_bytes
        if used_bytes > most_bytes and len(usage.pids) > 1:
            used_bytes = usage.exact_bytes()
        self._run.memory_bytes = max(self._run.memory_bytes, used_bytes)
        return used_bytes > most_bytes

    def _end_at(self, limit: Ending) -> None:
        """End the program. The first limit is the reason."""
        if self._run.limit is None:
            self._run.limit = limit
        self._command.stop(self._process)

    def finish(self) -> LimitedRun:
        """Collect status, CPU time and the rest of the output after the end of the command."""
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._run.status = self._process.returncode
        self._run.wall_s = time.monotonic() - self._start
        self._run.cpu_s = max(self._run.cpu_s, usage.ru_utime + usage.ru_stime)
        for descriptor in self._outputs:
            if not self._run.is_cut:
                with contextlib.suppress(KeyError, OSError):
                    self._receive(descriptor)
        self._run.stdout = bytes(self._outputs[self._stdout])
        self._run.stderr = bytes(self._outputs[self._stderr])
        return self._run

    def close(self) -> None:
        """Close all descriptors. End the command if an error left it running."""
        if self._process.returncode is None:
            self.resume()
            self._command.stop(self._process)
            try:
                self._process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for descriptor in (self._stdin, self._stdout, self._stderr, self._end):
            if descriptor >= 0:
                os.close(descriptor)


def _start_command(command: ConfinedCommand) -> tuple["subprocess.Popen[bytes]", int, int, int]:
    """Start a command; return it, and this process's ends of standard input, output and error."""
    program_stdin, stdin = os.pipe()
    stdout, program_stdout = os.pipe()
    stderr, program_stderr = os.pipe()
    has_request_pipe = STDIN in command.argv
    try:
        process = subprocess.Popen(
            [str(program_stdin) if word == STDIN else word for word in command.argv],
            stdin=subprocess.PIPE if has_request_pipe else program_stdin,
            stdout=program_stdout,
            stderr=program_stderr,
            pass_fds=[*command.descriptors, program_stdin] if has_request_pipe else command.descriptors,
            env={**command.variables, CONFINED: "1"},
            start_new_session=True,
        )
    except OSError as error:
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        raise SandboxError(f"{command.argv[0]} cannot be started: {error.strerror}") from error
    finally:
        for descriptor in (program_stdin, program_stdout, program_stderr):
            os.close(descriptor)
    return process, stdin, stdout, stderr


def send_signal(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
