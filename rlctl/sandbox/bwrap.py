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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlctl.sandbox.base import NO_IMAGES, Guarantee, Limits, Program, SandboxError, Strength, command_of, split_path
from rlctl.sandbox.limited_run import ConfinedCommand, LimitedRun, send_signal
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
from rlctl.sandbox.users import folder_user
from rlctl.sandbox.work_folder import WorkFolder

_WORK = "/home/program"
# The private folder for temporary files would hide a place below /tmp.
_PYTHON = "/python"
_SHARED_MEMORY_BYTES = 16 << 20
_BEGINNING = (
    "bwrap", "--die-with-parent", "--new-session", "--unshare-ipc", "--unshare-pid", "--unshare-uts",
    "--unshare-cgroup-try", "--as-pid-1", "--hostname", "sandbox",
)  # fmt: skip
# First process of the namespace. At its end the kernel ends all others, and its parent learns the CPU time of all. The
# shell's messages, such as on a signal, are dropped.
_KEEPER = ("sh", "-c", 'exec 3>&2 2>/dev/null; (exec 2>&3 3>&-; exec "$@"); exit $?', "sh")
_DROP_RIGHTS = ("--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all")


class BwrapSandbox(LocalSandbox):
    """Runs each program in its own bubblewrap. readable: further folders that programs may read."""

    name = "bwrap"

    def __init__(self, readable: Sequence[Path] = ()) -> None:
        super().__init__()
        self._has_root = os.geteuid() == 0
        missing = [name for name in ("bwrap", "setpriv", "prlimit") if shutil.which(name) is None]
        if missing:
            packages = "bubblewrap" if missing == ["bwrap"] else "bubblewrap util-linux"
            raise SandboxError(f"{', '.join(missing)} not found: apt-get install {packages}")
        self._readable = [*python_folders(), *readable]
        self._filter = make_filter(has_sockets=True, has_own_files=True)
        names = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="rlctl-bwrap-"))
        # Programs and libraries read it. Users of programs have no name.
        self._passwd = Path(names) / "passwd"
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

    @contextmanager
    def confine(self, program: Program, limits: Limits) -> Iterator[ConfinedProgram]:
        """Make the command that runs a program in new namespaces. Raises ValueError for a program with an image."""
        if program.image:
            raise ValueError(NO_IMAGES)
        argv, files = command_of(program, f"{_PYTHON}/bin/python")
        user = folder_user(program.folder) if self._has_root else None
        folder = WorkFolder(program.folder, user)
        with ExitStack() as stack:
            stack.callback(folder.remove)
            folder.write(files)
            status_file = stack.enter_context(tempfile.TemporaryFile())
            descriptors = [status_file.fileno()]
            words = [*_BEGINNING, "--json-status-fd", str(status_file.fileno())]
            if self._filter is not None:
                filter_file = stack.enter_context(open(os.memfd_create("filter"), "w+b"))
                filter_file.write(self._filter)
                filter_file.seek(0)
                descriptors.append(filter_file.fileno())
                words += ["--seccomp", str(filter_file.fileno())]

            def read_exit_code(run: LimitedRun) -> int | None:
                status_file.seek(0)
                return _read_exit_code(status_file.read())

            words += self._namespace_words(program, limits, folder, user)
            words += argv
            command = ConfinedCommand(
                argv=words,
                variables={"PATH": os.environ.get("PATH", os.defpath)},
                find_keeper=_find_keeper,
                stop=_stop_namespace,
                exceeds_files=lambda: folder.exceeds(limits.files_mib << 20),
                descriptors=descriptors,
            )
            yield ConfinedProgram(command, folder, read_exit_code)

    def _namespace_words(self, program: Program, limits: Limits, folder: WorkFolder, user: int | None) -> list[str]:
        """Return the words that describe a program's namespaces, user and limits."""
        words = [] if program.network else ["--unshare-net"]
        words += ["--bind", str(folder.temporary), "/tmp", *self._mounts(program.network)]
        words += ["--bind", str(folder.work), _WORK]
        for place, name in program.mounts.items():
            parents = [parent for parent in Path(place).parents if parent != Path("/")]
            for parent in reversed(parents):
                words += ["--perms", "0755", "--dir", str(parent)]
            words += ["--bind", str(folder.work.joinpath(*split_path(name))), place]
        words += ["--chdir", _WORK, "--remount-ro", "/", "--clearenv"]
        for name, text in program_variables(_WORK, "/tmp", dict(program.variables)).items():
            words += ["--setenv", name, text]
        words += ["--", *_KEEPER]
        # Without root the keeper counts too.
        most_processes = limits.processes + 1
        if user is not None:
            most_processes = limits.processes
            words += ["setpriv", f"--reuid={user}", f"--regid={user}", *_DROP_RIGHTS]
        words += ["prlimit", f"--nproc={most_processes}"]
        for name, number in limits.of_process().items():
            words.append(f"--{name.removeprefix('RLIMIT_').lower()}={number}")
        return words

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
    send_signal(process.pid if keeper is None else keeper)
