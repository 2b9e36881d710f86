"""A real Slurm on this machine, from nothing: munge, a controller and a daemon a node, in a folder of the test's own.

The nodes share this machine's address, files, processes and cores. Only their ports differ.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

CONFIG = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ReturnToService=2
InactiveLimit=0
KillWait=30
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores} RealMemory=1000\n"
PARTITION = "PartitionName=main Nodes=ALL Default=YES MaxTime=1:00:00 DefMemPerNode=500 State=UP\n"


class SlurmLab:
    """Slurm with nodes n1, n2, ... Commands that get the variables in `environment` use this Slurm."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.nodes = [f"n{index + 1}" for index in range(count)]
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all daemons, and wait until every node is idle. Raises AssertionError with their output."""
        # munge refuses a key or a socket in a folder that other users can write.
        self.folder.mkdir(mode=0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        host = socket.gethostname().partition(".")[0]
        controller_port, *node_ports = _find_free_ports(1 + len(self.nodes))
        config = CONFIG.format(folder=self.folder, host=host, controller=controller_port)
        for name, port in zip(self.nodes, node_ports):
            config += NODE.format(name=name, host=host, port=port, cores=os.cpu_count())
        (self.folder / "slurm.conf").write_text(config + PARTITION)
        for name in ("controller", *self.nodes):
            (self.folder / name).mkdir()
        files = [f"--{name}={self.folder}/munge.{end}" for name, end in _MUNGE_FILES]
        self._start_daemon("munged", "--foreground", "--force", f"--key-file={key}", *files)
        self._wait_until(lambda: (self.folder / "munge.sock").exists(), "munge")
        self._start_daemon("slurmctld", "-D")
        for name in self.nodes:
            self._start_daemon("slurmd", "-D", "-N", name)
        self._wait_until(lambda: self.states() == ["idle"] * len(self.nodes), "the nodes")

    def states(self) -> list[str]:
        """Return the state of each node."""
        return self.run("sinfo", "--noheader", "--Node", "--format=%T").split()

    def run(self, *command: str) -> str:
        """Return the output of one of Slurm's commands."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout

    def jobs(self) -> list[str]:
        """Return the ids of waiting and running jobs."""
        return self.run("squeue", "--noheader", "--format=%A").split()

    def stop(self) -> None:
        """End all jobs and daemons, also after a partial start."""
        if jobs := self.jobs():
            self.run("scancel", *jobs)
            end = time.monotonic() + 60
            while self.jobs() and time.monotonic() < end:
                time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start_daemon(self, name: str, *arguments: str) -> None:
        program = shutil.which(name) or f"/usr/sbin/{name}"
        log = (self.folder / f"{len(self._daemons)}-{name}.out").open("wb")
        environment = {**os.environ, **self.environment}
        command = [program, *arguments]
        self._daemons.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True))

    def _wait_until(self, is_up: Callable[[], bool], parts: str) -> None:
        end = time.monotonic() + 60
        while not is_up():
            output = "\n".join(path.read_text(errors="replace") for path in self.folder.glob("*.out"))
            assert time.monotonic() < end, f"{parts} did not come up:\n{output}"
            time.sleep(0.2)


_MUNGE_FILES = (("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))


def why_not() -> str:
    """Return the reason why Slurm cannot run on this machine; empty if it can."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch")
    missing = [name for name in programs if not shutil.which(name) and not Path(f"/usr/sbin/{name}").exists()]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


def _find_free_ports(count: int) -> list[int]:
    """Return `count` different free ports. All are reserved at once, so that none occurs twice."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
