"""A Python that waits in a sandbox: texts run one after another, and share their variables."""

import json
from pathlib import Path

from rlctl.sandbox.base import Ending, Limits, Program, SandboxError
from rlctl.sandbox.local_sandbox import LocalSandbox, ProgramSession, SessionEndedError

_INTERPRETER = Path(__file__).parent / "inside" / "interpreter.py"
_CUT = "\n[the rest of the output was cut]"


class WarmPython:
    """Interpreter in a sandbox, started at the first text, and again after a limit ended it.

    folder: its working folder, which is kept.
    """

    def __init__(self, sandbox: LocalSandbox, folder: Path, limits: Limits) -> None:
        self._sandbox = sandbox
        self._folder = folder
        self._limits = limits
        self._session: ProgramSession | None = None

    def run(self, text: str) -> str:
        """Run a text; return its output, with the value of a last expression. Raises SandboxError."""
        if self._session is None:
            program = Program(argv=("python", "-s", "-c", _INTERPRETER.read_text()), folder=self._folder)
            self._session = self._sandbox.open(program, self._limits)
        request = {"code": text, "most_bytes": self._limits.output_bytes}
        try:
            answer = json.loads(self._session.ask(json.dumps(request).encode()))
            return str(answer["output"]) + (_CUT if answer["is_cut"] else "")
        except SessionEndedError as error:
            self._session = None
            return describe_ending(error.ending, "The interpreter", "Its variables are lost.")
        except (ValueError, TypeError, KeyError):
            # The text wrote to the interpreter's own descriptors.
            self.close()
            return "The interpreter was ended: the code broke its connection. Its variables are lost."

    def close(self) -> None:
        """End the interpreter."""
        if self._session is not None:
            self._session.close()
            self._session = None


def describe_ending(ending: Ending, subject: str, consequence: str) -> str:
    """Return a line for the model on the end of a program."""
    if ending in (Ending.EXITED, Ending.SIGNAL):
        return f"{subject} ended. {consequence}"
    return f"{subject} was ended at its limit on {ending.replace('_', ' ')}. {consequence}"


def require_local(sandbox: object) -> LocalSandbox:
    """Return a sandbox that keeps a program between requests. Raises SandboxError for a server."""
    if not isinstance(sandbox, LocalSandbox):
        raise SandboxError("a server keeps no state: use sandbox.name=bwrap, process or command")
    return sandbox


def make_folder(parent: str) -> Path:
    """Make the working folder of an episode below a folder that other users may pass through."""
    path = Path(parent)
    path.chmod(0o711)
    folder = path / "work"
    folder.mkdir(mode=0o700)
    return folder
