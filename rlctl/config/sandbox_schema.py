"""Schema of the sandbox in which programs of the policy run."""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from dataclasses import dataclass
from typing import Literal

from rlctl.config.fields import MOST_PROCESSES, seconds, spec

SandboxName = Literal["auto", "bwrap", "process", "command", "url"]
# Guarantees that `sandbox.require` can ask for.
SandboxGuarantee = Literal["network", "files", "processes", "memory", "forks"]


@dataclass
class SandboxSection:
    """The sandbox of a run: its kind, the guarantees that must hold, and the limits of tools."""

    name: SandboxName = spec(
        "The kind of sandbox. auto is the strongest of bwrap and process that works here. command runs "
        "sandbox.command, url asks a server with the API of SandboxFusion. `sandbox: bwrap` is short for this key."
    )
    require: list[SandboxGuarantee] = spec(
        "The guarantees that must hold before programs run. A probe measures them at the start. A run with a weaker "
        "sandbox does not start. [] takes any."
    )
    command: str | None = spec(
        "Only with command: the words before a program's own, as `docker run --rm -i --name {id} --network none "
        "--memory {memory_mib}m --pids-limit {processes} -v {folder}:/work -w /work my-image`. The image has python3."
    )
    stop_command: str | None = spec(
        "Only with command: run after the end of each program, as `docker rm -f {id}`. null ends only the processes "
        "that command started."
    )
    url: str | None = spec("Only with url: the address of the server, as http://127.0.0.1:8080.")
    readable: list[str] = spec("Further folders that programs may read, besides the system and Python.", path="folder")
    wall_s: float = seconds("A program of a tool ends after this many seconds.", gt=0)
    cpu_s: float = seconds("A program of a tool ends after this many seconds of CPU time.", gt=0)
    memory_mib: int = spec("The memory of a tool's program and of its descendants together, in MiB.", ge=16)
    processes: int = spec("The processes and threads of a tool's program at one time.", ge=1, most=MOST_PROCESSES)
    output_kib: int = spec("The output of a tool's program, in KiB. The rest is cut, and the program ends.", ge=1)
    files_mib: int = spec("The size of all files of a tool's program, in MiB.", ge=1)
