"""Imports of a run's worker processes, made once while Ray starts, by a server that forks the workers.

`preloading` starts the server (fork_server.py). `ForkServer.command` changes the command by which Ray starts its
workers.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlctl.workers import fork_server, fork_stub
from rlctl.workers.reaper import scratch_folder

_RAYS_WORKER = "default_worker.py"
_RAYS_SETUP = "setup_worker.py"


@dataclass(frozen=True)
class ImportStage:
    """Imports of one kind of worker, on top of those of the stages before."""

    modules: Sequence[str]
    # Environment variables that the modules read at their import.
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ForkServer:
    """A running server, and the stages from which it forks the workers of one Ray."""

    # Folder of its sockets.
    folder: Path
    # Number of workers that each stage but the last forks, in the order in which Ray starts them.
    workers: Sequence[int] = ()

    def lost_stages(self) -> list[str]:
        """Return the names of the stages whose process has ended: their workers start as usual, and slower."""
        pid_files = sorted(self.folder.glob("stage-*.pid"))
        return [file.stem for file in pid_files if not fork_stub.lives(str(file))]

    def command(self, command: Sequence[str], places: Path) -> list[str]:
        """Return the command of a worker of Ray, changed so that the server forks it.

        places: folder of this Ray alone. A command of another form is returned as it is: its worker starts as usual.
        """
        names = [os.path.basename(word) for word in command[:3]]
        if names[1:] != [_RAYS_SETUP, _RAYS_WORKER]:
            return list(command)
        numbers = "".join(f"{number}," for number in self.workers)
        # The comma keeps an empty list of numbers a word of the command line.
        stub = [fork_stub.__file__, str(self.folder), str(places), numbers or ","]
        return [command[0], "-S", "-E", *stub, *command[2:]]


@contextmanager
def preloading(stages: Sequence[ImportStage], log: Path) -> Iterator[Path]:
    """Start a server of workers, and end it with the block. Yields its folder. The server's output goes to `log`."""
    with scratch_folder("rlctl-fork-") as folder:
        server = start_server(stages, folder, log, subprocess.PIPE)
        try:
            yield folder
        finally:
            assert server.stdin
            server.stdin.close()
            server.wait()


def start_server(stages: Sequence[ImportStage], folder: Path, log: Path, stdin: int) -> subprocess.Popen[bytes]:
    """Start a server whose sockets are in `folder`. It ends once its stdin, a pipe, has no writer."""
    # Torch and OpenMP read this number at their import. A worker sets its own number after the fork.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        server = subprocess.Popen(
            [sys.executable, fork_server.__file__, str(folder), json.dumps([asdict(stage) for stage in stages])],
            stdin=stdin,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    (folder / "stage-0.pid").write_text(str(server.pid))
    return server
