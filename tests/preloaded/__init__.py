"""Workers of Ray that begin with torch and vLLM imported: forked from a process of the suite.

A worker of a run imports for 2 to 6 s of CPU before it does anything. In a suite of some sixty runs and engines this
was half of the time. A server imports once. `hook/sitecustomize.py` runs at the start of each Python of a test, and has
a server fork the process that Ray asked for. From then on the process is as any other: its arguments, environment,
folder, files and signals are those that Ray gave, and it imports Ray and rlctl by itself.

There is one server for engines and one for other workers: torch and OpenMP read a part of their environment once, at
their import. Tests of how processes start and end ask for the fixture `ordinary_workers`.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rlctl.generation.vllm.kind import environment

# Environment variable with the folder of the servers' sockets, for the hook. If unset, workers start as for a user.
FOLDER = "RLCTL_TEST_PRELOADED"
HERE = Path(__file__).parent
MODULES = {
    "worker": ["torch.distributed.fsdp", "transformers"],
    "engine": [
        "torch.distributed.fsdp",
        "transformers",
        "vllm.engine.arg_utils",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.worker.cpu_worker",
    ],
}


def prepare() -> None:
    """Set the environment that all processes of the suite inherit, in its first process alone.

    With a CUDA device all workers are ordinary ones: a process that uses such a device must not fork.
    """
    if FOLDER in os.environ or Path("/dev/nvidiactl").exists():
        return
    folder = Path(tempfile.mkdtemp(prefix="rlp-"))
    (folder / "suite").write_text(str(os.getpid()))
    os.environ[FOLDER] = str(folder)
    paths = [str(HERE / "hook")]
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def start_servers() -> None:
    """Start the servers, if no process of the suite has yet. They end with the suite.

    A worker waits until its server answers.
    """
    if FOLDER not in os.environ:
        return
    folder = Path(os.environ[FOLDER])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for kind, modules in MODULES.items():
            if not (folder / f"{kind}.pid").exists():
                start_server(folder, kind, modules)


def start_server(folder: Path, kind: str, modules: list[str]) -> None:
    suite = (folder / "suite").read_text()
    # A trainer sets its number of threads itself after the fork.
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    if kind == "engine":
        variables |= environment("cpu", [])
    command = [sys.executable, "-m", "tests.preloaded.server", str(folder / kind), suite, *modules]
    with (folder / f"{kind}.log").open("w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=HERE.parents[1], env=variables, start_new_session=True
        )
    (folder / f"{kind}.pid").write_text(str(server.pid))


def describe_lost_servers() -> list[str]:
    """Return a line for each server that has ended before the suite: later workers started as for a user."""
    if FOLDER not in os.environ:
        return []
    lost = []
    for pid_file in Path(os.environ[FOLDER]).glob("*.pid"):
        if not Path(f"/proc/{pid_file.read_text()}").exists():
            log = pid_file.with_suffix(".log").read_text().strip()
            lost.append(f"the server of preloaded {pid_file.stem} processes has ended before the suite: {log[-2000:]}")
    return lost


def remove_folder() -> None:
    """Remove the servers' folder, in the suite's first process alone."""
    if FOLDER not in os.environ:
        return
    folder = Path(os.environ[FOLDER])
    if (folder / "suite").read_text() == str(os.getpid()):
        shutil.rmtree(folder)
