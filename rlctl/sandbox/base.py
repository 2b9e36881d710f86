"""The port `Sandbox`: a program, the limits on it, and its outcome.

A sandbox runs programs that a policy wrote. One call runs one program, and leaves nothing behind.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol, get_args

from rlctl.config.sandbox_schema import SandboxGuarantee

# Most CPU time of one process that answers requests.
_SESSION_CPU_S = 24 * 3600
# Share of a limit from which a program counts as near.
NEAR = 0.8

# Reason for which a sandbox without containers refuses a program.
NO_IMAGES = "an image of a container needs the sandbox command"

# Promises of a sandbox.
#   network: no packet leaves, and no service of the machine answers
#   files: nothing outside the program's folders can be written, and nothing but the system's files can be read
#   processes: other processes can be neither signalled nor read
#   memory: the program and its descendants together stay below the limit
#   forks: the number of processes stays below the limit, and none outlives the program
Guarantee = SandboxGuarantee
GUARANTEES: tuple[Guarantee, ...] = get_args(SandboxGuarantee)
# enforced: the kernel refuses; watched: rlctl measures every 50 ms and ends the program; absent: nothing stops it
# elsewhere: programs run on another machine, whose isolation is not measured
Strength = Literal["enforced", "watched", "absent", "elsewhere"]


class SandboxError(Exception):
    """A sandbox failed. Nothing is known about its program, so this is no verdict on the program."""


class Ending(StrEnum):
    """Reason for the end of a program."""

    # By itself, with an exit code.
    EXITED = "exited"
    # By a signal, such as SIGSEGV.
    SIGNAL = "signal"
    # All others: at a limit.
    WALL_TIME = "wall_time"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    PROCESSES = "processes"
    OUTPUT = "output"
    FILES = "files"


@dataclass(frozen=True)
class Limits:
    """Limits on one program and all of its descendants together."""

    # Ends programs that sleep. Verdicts come from the CPU time, which a busy machine does not change.
    wall_s: float = 20.0
    cpu_s: float = 10.0
    memory_mib: int = 512
    # Processes and threads at one time.
    processes: int = 64
    # Bytes of standard output and standard error together.
    output_bytes: int = 1 << 18
    # Size of all files that the program writes.
    files_mib: int = 64

    # CPU time after which the kernel ends a single process; None: two seconds after `cpu_s`, which is measured.
    process_cpu_s: int | None = None

    def per_request(self, output_bytes: int) -> "Limits":
        """Return the limits for each request of a program that answers any number."""
        return replace(self, output_bytes=output_bytes, process_cpu_s=_SESSION_CPU_S)

    def of_process(self) -> dict[str, int]:
        """Return the limits that the kernel holds for each process by itself, by their names in `resource`."""
        cpu_s = int(self.cpu_s) + 2 if self.process_cpu_s is None else self.process_cpu_s
        return {
            "RLIMIT_CPU": cpu_s,
            "RLIMIT_AS": self.memory_mib << 20,
            "RLIMIT_FSIZE": self.files_mib << 20,
            "RLIMIT_NOFILE": 256,
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_MEMLOCK": 1 << 16,
        }


@dataclass(frozen=True)
class Program:
    """A program: a command, or a source text with its language."""

    # Command, run in the working folder.
    argv: tuple[str, ...] = ()
    # In place of a command: text of a program.
    source: str | None = None
    # Language of `source`, a key of LANGUAGES.
    language: str = "python"
    stdin: bytes = b""
    # Path in the working folder -> content, written before the start.
    files: Mapping[str, bytes] = field(default_factory=dict)
    # Paths in the working folder of files that are returned.
    outputs: tuple[str, ...] = ()
    # Further environment variables.
    variables: Mapping[str, str] = field(default_factory=dict)
    # True: the program has the machine's network.
    network: bool = False
    # Working folder on this machine, which is kept; None: a new one, which is removed.
    folder: Path | None = None
    # Absolute path in the sandbox -> folder in the working folder that is there too, writable: `bwrap` and `command`.
    mounts: Mapping[str, str] = field(default_factory=dict)
    # Image of a container in which the program runs; only `command` has images.
    image: str = ""


@dataclass(frozen=True)
class Language:
    """The way to run a source text."""

    file: str
    # Command of the interpreter, before the name of the file. "python" is the sandbox's Python.
    argv: tuple[str, ...]


LANGUAGES = {
    # -s: no packages of a user.
    "python": Language("main.py", ("python", "-s")),
    "bash": Language("main.sh", ("bash",)),
    "sh": Language("main.sh", ("sh",)),
}


@dataclass(frozen=True)
class Result:
    """Outcome of one program."""

    ending: Ending
    # Exit code, 128 plus the signal's number after a signal; None after a limit.
    exit_code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    # True if the program wrote more than its output's limit. The rest is dropped.
    is_cut: bool = False
    # Content of each file asked for that is a plain file within the limit.
    files: Mapping[str, bytes] = field(default_factory=dict)
    # File asked for -> reason for its absence.
    missing: Mapping[str, str] = field(default_factory=dict)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    # Largest memory seen; 0 if the sandbox does not measure it.
    memory_bytes: int = 0

    @property
    def has_passed(self) -> bool:
        """True if the program ended by itself with exit code 0."""
        return self.ending is Ending.EXITED and self.exit_code == 0

    def is_near(self, limits: Limits) -> bool:
        """Return True if the program used at least 80% of the limit on CPU time, wall time or memory."""
        shares = (
            self.cpu_s / limits.cpu_s,
            self.wall_s / limits.wall_s,
            self.memory_bytes / (limits.memory_mib << 20),
        )
        return max(shares) >= NEAR


class Sandbox(Protocol):
    """Runs programs. Threads may call `run` at the same time."""

    @property
    def name(self) -> str:
        """Name for configs and messages."""

    @property
    def isolation(self) -> Mapping[Guarantee, Strength]:
        """Strength of each guarantee here, as far as the implementation knows."""

    def run(self, program: Program, limits: Limits) -> Result:
        """Run a program to its end or to a limit; return its outcome when all of its processes are gone.

        Raises SandboxError if the sandbox failed, and ValueError for a program that it cannot express.
        """

    def close(self) -> None:
        """Free what the sandbox holds. No call follows."""


def command_of(program: Program, python: str) -> tuple[tuple[str, ...], dict[str, bytes]]:
    """Return the command of a program, and its files with the one of its source. python: path of the interpreter.

    Raises ValueError for a language without a row in LANGUAGES, and for files outside the working folder.
    """
    files = dict(program.files)
    argv = program.argv
    if program.source is not None:
        if program.language not in LANGUAGES:
            raise ValueError(f"language {program.language!r} is none of {', '.join(LANGUAGES)}")
        language = LANGUAGES[program.language]
        files[language.file] = program.source.encode("utf-8", "surrogatepass")
        argv = (*language.argv, language.file)
    if not argv:
        raise ValueError("a program needs argv or a source")
    if argv[0] == "python":
        argv = (python, *argv[1:])
    for name in (*files, *program.outputs):
        split_path(name)
    return argv, files


def split_path(name: str) -> tuple[str, ...]:
    """Return the parts of a path in the working folder. Raises ValueError if it leads outside."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"file {name!r}: a path inside the working folder is needed")
    return path.parts
