"""Sandboxes that run a command on this machine: one program, or one that answers requests."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from rlctl.sandbox.base import Ending, Limits, Program, Result, SandboxError
from rlctl.sandbox.limited_run import ConfinedCommand, LimitedRun, Supervision, run_limited
from rlctl.sandbox.work_folder import WorkFolder

# Bytes of a reply besides the limit on output: names, numbers, and escapes of JSON.
_REPLY_FACTOR = 6
_REPLY_BYTES = 1 << 16


@dataclass(frozen=True)
class ConfinedProgram:
    """Command of a program, and its folder."""

    command: ConfinedCommand
    folder: WorkFolder
    # Return the program's exit code after its end; None if it was not run.
    read_exit_code: Callable[[LimitedRun], int | None]


class SessionEndedError(Exception):
    """A program that answered requests has ended. Its state is lost."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending
        super().__init__(str(ending))


class LocalSandbox(ABC):
    """Base class of sandboxes on this machine."""

    def __init__(self) -> None:
        # Files of the sandbox, which `close` removes.
        self._resources = ExitStack()

    @abstractmethod
    def confine(self, program: Program, limits: Limits) -> AbstractContextManager[ConfinedProgram]:
        """Make the folder and the command of a program. The end of the context removes them."""

    def run(self, program: Program, limits: Limits) -> Result:
        """Run a program to its end or to a limit."""
        try:
            with self.confine(program, limits) as confined:
                run = run_limited(confined.command, program.stdin, limits)
                return make_result(run, confined.read_exit_code(run), program, confined.folder, limits)
        except OSError as error:
            raise SandboxError(f"{error.filename or 'a descriptor'}: {error.strerror}") from error

    def open(self, program: Program, limits: Limits) -> "ProgramSession":
        """Start a program that answers requests."""
        return ProgramSession(self, program, limits)

    def close(self) -> None:
        """Remove the sandbox's files."""
        self._resources.close()


class ProgramSession:
    """Program in a sandbox that answers requests of one line by one line each.

    Limits on time and output are of one request. Its processes are stopped between requests, so they use no CPU time,
    and nothing happens that no limit sees.
    """

    def __init__(self, sandbox: LocalSandbox, program: Program, limits: Limits) -> None:
        self._stack = ExitStack()
        output_bytes = _REPLY_FACTOR * limits.output_bytes + _REPLY_BYTES
        limits = limits.per_request(output_bytes)
        try:
            confined = self._stack.enter_context(sandbox.confine(program, limits))
            self._supervision = Supervision(confined.command, program.stdin, limits, keeps_input=True)
            self._stack.callback(self._supervision.close)
        except OSError as error:
            self._stack.close()
            raise SandboxError(f"{error.filename or 'a descriptor'}: {error.strerror}") from error

    def ask(self, request: bytes) -> bytes:
        """Send a line and return the answer. Raises SessionEndedError if the program ends; no request follows then."""
        self._supervision.send(request + b"\n")
        while True:
            line = self._supervision.take_line()
            if line is not None:
                self._supervision.pause()
                return line
            if not self._supervision.step():
                run = self._supervision.finish()
                self.close()
                raise SessionEndedError(run.limit or Ending.EXITED)

    def close(self) -> None:
        """End the program."""
        self._stack.close()


def make_result(run: LimitedRun, exit_code: int | None, program: Program, folder: WorkFolder, limits: Limits) -> Result:
    """Return the outcome of a program after the end of all its processes, with the files asked for.

    exit_code: exit code of the program, 128 plus a signal's number; None if the sandbox never learned it.
    """
    ending = run.limit
    if ending is None:
        if exit_code is None:
            text = run.stderr.decode(errors="replace").strip()
            raise SandboxError(f"the program was not run: {text[-300:] or f'exit status {run.status}'}")
        ending = _read_ending(exit_code)
        if run.cpu_s > limits.cpu_s:
            ending = Ending.CPU_TIME
        elif folder.exceeds(limits.files_mib << 20):
            ending = Ending.FILES
    files, missing = folder.read(program.outputs, limits.files_mib << 20)
    return Result(
        ending=ending,
        exit_code=exit_code if ending in (Ending.EXITED, Ending.SIGNAL) else None,
        stdout=run.stdout,
        stderr=run.stderr,
        is_cut=run.is_cut,
        files=files,
        missing=missing,
        wall_s=run.wall_s,
        cpu_s=run.cpu_s,
        memory_bytes=run.memory_bytes,
    )


def _read_ending(exit_code: int) -> Ending:
    """Return the reason that an exit code stands for."""
    if exit_code == 128 + 24:  # SIGXCPU
        return Ending.CPU_TIME
    if exit_code == 128 + 25:  # SIGXFSZ
        return Ending.FILES
    return Ending.SIGNAL if 128 < exit_code <= 128 + 64 else Ending.EXITED
