"""Commands of this machine that are asked something: Slurm's, kubectl, ssh."""

import subprocess
from collections.abc import Mapping, Sequence


def answer(
    command: Sequence[str], deadline_s: float, stdin: str = "", environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """What it printed, and its exit code. Raises TimeoutExpired, FileNotFoundError.

    In a session of its own: Ctrl-C is this process's to handle.
    """
    process = started(command, environment)
    try:
        out, err = process.communicate(stdin, timeout=deadline_s)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def started(command: Sequence[str], environment: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """The command with pipes to its three streams, in a session of its own. Raises FileNotFoundError."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        errors="replace",
        env=environment,
    )
