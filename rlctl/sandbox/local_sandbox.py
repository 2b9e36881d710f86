"""Sandboxes that run a command on this machine: one program, or one that answers requests."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from rlctl.sandbox.base import Ending, Limits, Program, Result, SandboxError
from rlctl.sandbox.limited_run import ConfinedCommand, LimitedRun, Supervision, make_result, run_limited
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
