"""Sandbox of bubblewrap: namespaces of the kernel, a read-only system, a private working folder.

As root each program gets its own user id, because the kernel limits the number of root's processes in no namespace.
Without root, bubblewrap makes a namespace of users, in which the limit counts the program's processes alone.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from rlctl.sandbox.base import Guarantee, Limits, Program, Result, SandboxError, Strength, command_of
from rlctl.sandbox.limited_run import ConfinedCommand, kill, make_result, run_limited
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
from rlctl.sandbox.users import free_user
from rlctl.sandbox.work_folder import WorkFolder

_WORK = "/home/program"
# The private folder for temporary files would hide a place below /tmp.
_PYTHON = "/python"
_SHARED_MEMORY_BYTES = 16 << 20
# First process of the namespace. At its end the kernel ends all others, and its parent learns the CPU time of all. The
# shell's messages, such as on a signal, are dropped.
_KEEPER = ("sh", "-c", 'exec 3>&2 2>/dev/null; (exec 2>&3 3>&-; exec "$@"); exit $?', "sh")
_DROP_RIGHTS = ("--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all")


class BwrapSandbox:
    """Runs each program in its own bubblewrap. readable: further folders that programs may read."""

    name = "bwrap"

    def __init__(self, readable: Sequence[Path] = ()) -> None:
        self._has_root = os.geteuid() == 0
        missing = [name for name in ("bwrap", "setpriv", "prlimit") if shutil.which(name) is None]
        if missing:
            packages = "bubblewrap" if missing == ["bwrap"] else "bubblewrap util-linux"
            raise SandboxError(f"{', '.join(missing)} not found: apt-get install {packages}")
        self._readable = [*python_folders(), *readable]
        self._filter = make_filter(has_sockets=True, has_own_files=True)
        self._names = tempfile.TemporaryDirectory(prefix="rlctl-bwrap-")
        # Programs and libraries read it. Users of programs have no name.
        self._passwd = Path(self._names.name) / "passwd"
        self._passwd.write_text("root:x:0:0:root:/:/bin/false\n")
        self._passwd.chmod(0o644)

    @property
    def isolation(self) -> Mapping[Guarantee, Strength]:
        """Strength of each guarantee, if bubblewrap works here."""
        return {
            "network": "enforced",
            "files": "enforced",
            "processes": "enforced",
            "memory": "watched",
            "forks": "enforced",
        }

    def run(self, program: Program, limits: Limits) -> Result:
        """Run a program in new namespaces."""
        argv, files = command_of(program, f"{_PYTHON}/bin/python")
        user = free_user() if self._has_root else None
        folder = WorkFolder(program.folder, user)
        try:
            folder.write(files)
            with tempfile.TemporaryFile() as status_file:
                command = self._confine(program, argv, limits, folder, user, status_file)
                try:
                    run = run_limited(command, program.stdin, limits)
                finally:
                    for descriptor in command.descriptors:
                        if descriptor != status_file.fileno():
                            os.close(descriptor)
                status_file.seek(0)
                exit_code = _read_exit_code(status_file.read())
            return make_result(run, exit_code, program, folder, limits)
        except OSError as error:
            raise SandboxError(f"working folder: {error.strerror}") from error
        finally:
            folder.remove()

    def close(self) -> None:
        """Remove the sandbox's files."""
        self._names.cleanup()

    def _confine(
        self,
        program: Program,
        argv: Sequence[str],
        limits: Limits,
        folder: WorkFolder,
        user: int | None,
        status_file: IO[bytes],
    ) -> ConfinedCommand:
        """Return the command that runs a program in new namespaces."""
        descriptors = [status_file.fileno()]
        words = [
            "bwrap", "--die-with-parent", "--new-session", "--unshare-ipc", "--unshare-pid", "--unshare-uts",
            "--unshare-cgroup-try", "--as-pid-1", "--hostname", "sandbox", "--json-status-fd",
            str(status_file.fileno()),
        ]  # fmt: skip
        if not program.network:
            words.append("--unshare-net")
        words += ["--bind", str(folder.temporary), "/tmp", *self._mounts(program.network)]
        words += ["--bind", str(folder.work), _WORK, "--chdir", _WORK, "--remount-ro", "/", "--clearenv"]
        for name, text in program_variables(_WORK, "/tmp", dict(program.variables)).items():
            words += ["--setenv", name, text]
        if self._filter is not None:
            filter_descriptor = os.memfd_create("filter")
            os.write(filter_descriptor, self._filter)
            os.lseek(filter_descriptor, 0, os.SEEK_SET)
            descriptors.append(filter_descriptor)
            words += ["--seccomp", str(filter_descriptor)]
        words += ["--", *_KEEPER]
        # Without root the keeper counts too.
        most_processes = limits.processes + 1
        if user is not None:
            most_processes = limits.processes
            words += ["setpriv", f"--reuid={user}", f"--regid={user}", *_DROP_RIGHTS]
        words += ["prlimit", f"--nproc={most_processes}"]
        for name, value in limits.of_process().items():
            words.append(f"--{name.removeprefix('RLIMIT_').lower()}={value}")
        words += argv
        most_file_bytes = limits.files_mib << 20
        return ConfinedCommand(
            argv=words,
            variables={"PATH": os.environ.get("PATH", os.defpath)},
            find_keeper=_find_keeper,
            stop=_stop_namespace,
            exceeds_files=lambda: folder.exceeds(most_file_bytes),
            descriptors=descriptors,
        )

    def _mounts(self, network: bool) -> list[str]:
        """Return the words that mount the system, read-only, with /dev and /proc."""
        words = []
        for name in SYSTEM_FOLDERS:
            path = Path(name)
            if path.is_symlink():
                words += ["--symlink", os.readlink(path), name]
            elif path.is_dir():
                words += ["--ro-bind", name, name]
        files = SYSTEM_FILES + NETWORK_FILES if network else SYSTEM_FILES
        for name in files:
            words += ["--ro-bind-try", name, name]
        # bubblewrap would make them for root alone.
        parents = set[Path]()
        for folder in (Path(_WORK), *self._readable):
            parents.update(folder.parents[:-1])
        for parent in sorted(parents - {Path("/tmp")}):
            words += ["--perms", "0755", "--dir", str(parent)]
        for folder in self._readable:
            words += ["--ro-bind", str(folder), str(folder)]
        words += ["--ro-bind", str(python_home()), _PYTHON, "--ro-bind", str(self._passwd), "/etc/passwd"]
        words += ["--proc", "/proc", "--dev", "/dev"]
        words += ["--size", str(_SHARED_MEMORY_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        return words


def _read_exit_code(status: bytes) -> int | None:
    """Return the exit code in the JSON lines of bubblewrap; None if it ran no program."""
    for line in status.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return int(json.loads(line)["exit-code"])
    return None


def _find_keeper(pid: int) -> int | None:
    """Return the first process of the namespace, given the process of bubblewrap outside."""
    children = children_of(pid)
    return children[0] if children else None


def _stop_namespace(process: "subprocess.Popen[bytes]") -> None:
    """End the first process of the namespace: the kernel then ends all others."""
    keeper = _find_keeper(process.pid)
    kill(process.pid if keeper is None else keeper)
