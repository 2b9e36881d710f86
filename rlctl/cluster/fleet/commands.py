"""Commands of this machine that are asked something: Slurm's, kubectl."""

import subprocess
from collections.abc import Mapping, Sequence


def answer(
    command: Sequence[str], deadline_s: float, stdin: str = "", environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """What it printed, and its exit code. Raises TimeoutExpired, FileNotFoundError.

    In a session of its own: Ctrl-C is this process's to handle.
    """
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        start_new_session=True,
        text=True,
        errors="replace",
        timeout=deadline_s,
        env=environment,
        check=False,
    )
