"""Sandbox of a command of the user's: docker, podman, apptainer, or the client of a cloud.

The command isolates the program. rlctl holds wall time, output and files, and ends the command.
"""

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from string import Formatter
from typing import Any

from rlctl.sandbox.base import GUARANTEES, Guarantee, Limits, Program, SandboxError, Strength, command_of
from rlctl.sandbox.limited_run import ConfinedCommand, LimitedRun
from rlctl.sandbox.local_sandbox import ConfinedProgram, LocalSandbox
from rlctl.sandbox.work_folder import WorkFolder

# Names that a command may have in braces.
PLACES = ("id", "folder", "memory_mib", "processes", "cpu_s", "wall_s")
# Those of a command for programs with images. A word with `mount` is repeated for each mount, HOST:PLACE.
CONTAINER_PLACES = (*PLACES, "image", "mount")
# Exit code of docker and podman if they could not run a program.
_NO_CONTAINER = 125
_STOP_S = 30.0


class CommandSandbox(LocalSandbox):
    """Runs each program by a command. stop_command: run after each program. places: names in the command's braces."""

    name = "command"

    def __init__(self, command: str, stop_command: str | None = None, places: Sequence[str] = PLACES) -> None:
        super().__init__()
        self._words = split_command(command, places)
        self._stop_words = split_command(stop_command) if stop_command else []

    @property
    def isolation(self) -> Mapping[Guarantee, Strength]:
        """Strength of each guarantee, as the user's command promises it: only the probe knows."""
        return dict.fromkeys(GUARANTEES, "enforced")

    @contextmanager
    def confine(self, program: Program, limits: Limits) -> Iterator[ConfinedProgram]:
        """Make the command of a program. Raises ValueError if the program asks for what the command does not have."""
        self._check_places(program)
        if program.network:
            raise ValueError("the network of a program is chosen in sandbox.command")
        argv, files = command_of(program, "python3")
        folder = WorkFolder(program.folder, None)
        values = {
            "id": f"rlctl-{secrets.token_hex(8)}",
            "folder": str(folder.work),
            "memory_mib": limits.memory_mib,
            "processes": limits.processes,
            "cpu_s": limits.cpu_s,
            "wall_s": limits.wall_s,
            "image": program.image,
        }
        mounts = [f"{folder.work / name}:{place}" for place, name in program.mounts.items()]
        try:
            folder.write(files)
            words = fill_words(self._words, values, mounts)
            if program.variables:
                words.append("env")
                words += [f"{name}={text}" for name, text in program.variables.items()]
            command = ConfinedCommand(
                argv=[*words, *argv],
                variables=dict(os.environ),
                find_keeper=lambda pid: None,
                stop=_kill_group,
                exceeds_files=lambda: folder.exceeds(limits.files_mib << 20),
            )
            yield ConfinedProgram(command, folder, _read_status)
        finally:
            self._stop(fill_words(self._stop_words, values))
            folder.remove()

    def _check_places(self, program: Program) -> None:
        """Raise ValueError if the command has no place for a program's mounts or image, or asks for an image."""
        text = " ".join(self._words)
        if program.mounts and "{mount}" not in text:
            raise ValueError("the command has no {mount} for the folders of the program")
        if bool(program.image) != ("{image}" in text):
            raise ValueError(f"the command {'has no {image}' if program.image else 'needs a program with an {image}'}")

    def _stop(self, words: Sequence[str]) -> None:
        """Run the command that ends a program."""
        if words:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(words, capture_output=True, timeout=_STOP_S, check=False)


def _read_status(run: LimitedRun) -> int | None:
    return run.status if run.status >= 0 and run.status != _NO_CONTAINER else None


def split_command(command: str, places: Sequence[str] = PLACES) -> list[str]:
    """Return the words of a command. Raises SandboxError for one that is none, or for an unknown name in braces."""
    try:
        words = shlex.split(command)
        names = {name for _, name, _, _ in Formatter().parse(" ".join(words)) if name is not None}
    except ValueError as error:
        raise SandboxError(f"{command!r} is no command: {error}") from error
    if not words:
        raise SandboxError("the command is empty")
    if unknown := sorted(names - set(places)):
        known = ", ".join(f"{{{name}}}" for name in places)
        raise SandboxError(f"{{{unknown[0]}}} is none of {known}")
    return words


def fill_words(words: Sequence[str], values: Mapping[str, Any], mounts: Sequence[str] = ()) -> list[str]:
    """Return the words with the values in place of their names in braces. mounts: values of `mount`."""
    filled_words: list[str] = []
    for word in words:
        own_mounts = mounts if "{mount}" in word else [""]
        filled_words += [word.format(**values, mount=mount) for mount in own_mounts]
    return filled_words


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """End the command and the processes of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
