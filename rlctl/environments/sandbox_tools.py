"""Environments with the tools `python` and `shell`, which run in the run's sandbox. Rewards value the episodes."""

import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from typing import Any

from rlctl.sandbox.base import Ending, Limits, Program, SandboxError
from rlctl.sandbox.local_sandbox import LocalSandbox
from rlctl.sandbox.open_sandbox import open_sandbox, run_section, section_limits
from rlctl.sandbox.warm_python import WarmPython, describe_ending, make_folder, require_local


class SandboxTools:
    """Base class of environments with tools in a sandbox. One instance is one episode with one working folder.

    A class of a user's may inherit the tools, and add `get_reward`.
    """

    def reset(self, files: Mapping[str, str] | None = None, **row: Any) -> None:
        """Begin an episode. files: column of a row with files of the working folder, path -> text."""
        self._parent = tempfile.TemporaryDirectory(prefix="rlctl-episode-", ignore_cleanup_errors=True)
        self._folder = make_folder(self._parent.name)
        self._python: WarmPython | None = None
        if files:
            contents = {name: text.encode() for name, text in files.items()}
            self._run_program(Program(argv=("true",), files=contents, folder=self._folder))

    def close(self) -> None:
        """End the interpreter, and remove the working folder."""
        if self._python is not None:
            self._python.close()
        self._parent.cleanup()

    def _run_python(self, code: str) -> str:
        """Run a text in the episode's interpreter."""
        sandbox, limits = _open_once()
        if self._python is None:
            self._python = WarmPython(sandbox, self._folder, limits)
        try:
            return self._python.run(code)
        except SandboxError as error:
            sys.exit(f"the sandbox failed: {error}")

    def _run_shell(self, command: str) -> str:
        """Run a command in the episode's folder."""
        program = Program(argv=("sh", "-c", command), folder=self._folder)
        return self._run_program(program)

    def _run_program(self, program: Program) -> str:
        """Run a program; return its output. A sandbox that fails ends the episode as a failure, not with a reward."""
        sandbox, limits = _open_once()
        try:
            result = sandbox.run(program, limits)
        except SandboxError as error:
            sys.exit(f"the sandbox failed: {error}")
        lines = [(result.stdout + result.stderr).decode(errors="replace").rstrip("\n")]
        if result.ending is not Ending.EXITED:
            lines.append(describe_ending(result.ending, "The command", "Files that it wrote are kept."))
        elif result.exit_code:
            lines.append(f"exit code {result.exit_code}")
        return "\n".join(line for line in lines if line)


class PythonTool(SandboxTools):
    """Tool `python`: code with variables that stay during the episode."""

    def python(self, code: str) -> str:
        """Run Python code. Variables and files stay until the end of the conversation.

        Args:
            code: The code. The value of a last expression is printed.

        Returns:
            The output.
        """
        return self._run_python(code)


class ShellTool(SandboxTools):
    """Tool `shell`: commands with files that stay during the episode."""

    def shell(self, command: str) -> str:
        """Run a shell command. Files stay until the end of the conversation.

        Args:
            command: The command, for sh.

        Returns:
            The output, and the exit code if it is not 0.
        """
        return self._run_shell(command)


class PythonShellTools(PythonTool, ShellTool):
    """Tools `python` and `shell` with one working folder."""


@cache
def _open_once() -> tuple[LocalSandbox, Limits]:
    """Open the run's sandbox, once a process. An error ends the episode as a failure."""
    try:
        section = run_section()
        return require_local(open_sandbox()), section_limits(section) if section else Limits()
    except SandboxError as error:
        sys.exit(f"the sandbox failed: {error}")
