"""Sandbox of one process below supervisors: limits of the kernel, Landlock, and a filter of system calls.

It is weaker than namespaces. Programs share the kernel's other names with the machine: users, clocks, mounts.
"""

import base64
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rlctl.sandbox import confine
from rlctl.sandbox.base import NO_IMAGES, Guarantee, Limits, Program, SandboxError, Strength, command_of
from rlctl.sandbox.limited_run import STDIN, ConfinedCommand, LimitedRun
from rlctl.sandbox.local_sandbox import ConfinedProgram, LocalSandbox
from rlctl.sandbox.process_tree import children_of
from rlctl.sandbox.python_home import (
    NETWORK_FILES,
    SYSTEM_FILES,
    SYSTEM_FOLDERS,
    program_variables,
    python_folders,
    python_home,
)
from rlctl.sandbox.seccomp import make_filter
from rlctl.sandbox.users import count_tasks, folder_user
from rlctl.sandbox.work_folder import WorkFolder
from rlctl.workers import supervisor

# Devices that programs read and write.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SUPERVISOR = (sys.executable, "-I", supervisor.__file__)
_CONFINER = (sys.executable, "-I", "-S", confine.__file__)
# A judge of programs measures them there. Memory and environment of processes outside stay closed, by Landlock.
_PROCESS_FILES = ("/proc",)
# Versions of Landlock that are needed: 1 limits files, 6 limits signals.
_FILES_VERSION = 1
_SIGNALS_VERSION = 6


@dataclass(frozen=True)
class Confinement:
    """Arguments of `confine.py`."""

    work: str
    readable: tuple[str, ...]
    writable: tuple[str, ...]
    # Name in the module `resource` -> limit.
    limits: dict[str, int]
    variables: dict[str, str]
    # User id to become; None: none.
    user: int | None
    # Filter of system calls in base64; "": none.
    filter: str


class ProcessSandbox(LocalSandbox):
    """Runs each program in its own process. readable: further folders that programs may read."""

    name = "process"

    def __init__(self, readable: Sequence[Path] = ()) -> None:
        super().__init__()
        self._landlock = confine.landlock_version()
        self._has_root = os.geteuid() == 0
        self._readable = [*python_folders(), python_home(), *readable]

    @property
    def isolation(self) -> Mapping[Guarantee, Strength]:
        """Strength of each guarantee, by the kernel's version of Landlock."""
        has_filter = make_filter(has_sockets=False, has_own_files=False) is not None
        # As root each program has its own user id, which may signal no other.
        holds_signals = self._has_root or self._landlock >= _SIGNALS_VERSION
        return {
            "network": "enforced" if has_filter else "absent",
            "files": "enforced" if has_filter and self._landlock >= _FILES_VERSION else "absent",
            "processes": "enforced" if has_filter and holds_signals else "absent",
            "memory": "watched",
            "forks": "enforced" if self._has_root else "watched",
        }

    @contextmanager
    def confine(self, program: Program, limits: Limits) -> Iterator[ConfinedProgram]:
        """Make the command that runs a program below two supervisors. Raises ValueError for mounts and images."""
        if program.mounts:
            raise ValueError("mounts need namespaces: sandbox bwrap")
        if program.image:
            raise ValueError(NO_IMAGES)
        argv, files = command_of(program, str(python_home() / "bin" / "python"))
        user = folder_user(program.folder) if self._has_root else None
        folder = WorkFolder(program.folder, user)
        with ExitStack() as stack:
            stack.callback(folder.remove)
            folder.write(files)
            # The supervisor reports errors of its start to a socket. It starts a Python, so there are none.
            _, supervisor_end = map(stack.enter_context, socket.socketpair())
            status_file = stack.enter_context(tempfile.TemporaryFile())
            confinement = json.dumps(asdict(self._make_confinement(program, limits, folder, user)))
            words = [*_SUPERVISOR, str(supervisor_end.fileno()), *_CONFINER, confinement]

            def read_exit_code(run: LimitedRun) -> int | None:
                status_file.seek(0)
                if error := status_file.read().decode(errors="replace"):
                    raise SandboxError(f"the program was not run: {error}")
                # A negative status: a signal ended the supervisor itself.
                return run.status if run.status >= 0 else None

            command = ConfinedCommand(
                argv=[*words, STDIN, str(status_file.fileno()), *argv],
                variables={"PATH": os.environ.get("PATH", os.defpath)},
                find_keeper=_find_inner_supervisor,
                stop=_stop_supervisor,
                exceeds_files=lambda: folder.exceeds(limits.files_mib << 20),
                descriptors=[supervisor_end.fileno(), status_file.fileno()],
            )
            yield ConfinedProgram(command, folder, read_exit_code)

    def _make_confinement(self, program: Program, limits: Limits, folder: WorkFolder, user: int | None) -> Confinement:
        """Return the arguments of `confine.py` for a program."""
        calls = make_filter(has_sockets=program.network, has_own_files=False) or b""
        work = str(folder.work)
        temporary = str(folder.temporary)
        files = SYSTEM_FILES + NETWORK_FILES if program.network else SYSTEM_FILES
        folders = tuple(map(str, self._readable))
        # As this user, the program counts together with all processes of this user.
        other_tasks = 0 if user is not None else count_tasks(os.getuid())
        return Confinement(
            work=work,
            readable=SYSTEM_FOLDERS + files + folders + _PROCESS_FILES,
            writable=(work, temporary, *_DEVICES),
            limits={**limits.of_process(), "RLIMIT_NPROC": other_tasks + limits.processes},
            variables=program_variables(work, temporary, dict(program.variables)),
            user=user,
            filter=base64.b64encode(calls).decode(),
        )


def _find_inner_supervisor(pid: int) -> int | None:
    """Return the inner supervisor, given the outer one. It runs the program, and adopts orphans."""
    children = children_of(pid)
    return children[0] if children else None


def _stop_supervisor(process: "subprocess.Popen[bytes]") -> None:
    """Ask the outer supervisor to end everything below it."""
    assert process.stdin is not None
    process.stdin.close()
