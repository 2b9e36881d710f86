"""Hostile programs are contained by each sandbox: nothing outside is reached, changed or left running."""

import hashlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from rlctl.config.sandbox_schema import SandboxName
from rlctl.sandbox.base import Limits, Program, Result, Sandbox
from tests.faults.hostile_programs import CANARY, ESCAPED, HOSTILE_PROGRAMS, HostileProgram
from tests.unit.sandbox.kinds import LOCAL_KINDS, local_sandbox

LIMITS = Limits(wall_s=4.0, cpu_s=1.0, memory_mib=192, processes=32, output_bytes=50_000, files_mib=32)
# Seconds beyond a limit in which everything is gone, on a busy machine.
SPARE_S = 20.0
# Memory beyond the limit between two measurements.
SPARE_BYTES = 512 << 20
# Kind -> programs that it does not contain, each with the reason. rlctl/sandbox/README.md names them too.
NOT_CONTAINED: dict[SandboxName, dict[str, str]] = {
    "bwrap": {},
    # A program sees which processes are there, without a way to touch one.
    "process": {
        "pidfd of the parent": "it learns that a process is there",
        "processes of others": "it sees their numbers",
        "read /proc/{pid}/cmdline": "it reads their command lines",
    },
}
# Files and folders of this machine that programs try to change.
WATCHED_FILES = ("/etc/passwd", "/etc/shadow", "/etc/hosts", "/usr/bin/env")
WATCHED_FOLDERS = ("/", "/etc", "/usr", "/usr/bin", "/root", "/home", "/var/tmp", "/dev", "/boot")


@dataclass
class Victim:
    """Things of this machine that programs try to reach."""

    folder: Path
    process: subprocess.Popen[bytes]
    tcp: socket.socket
    udp: socket.socket
    unix: socket.socket
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    def place(self, source: str) -> str:
        """Return a program with these things in it."""
        places = {
            "{folder}": str(self.folder),
            "{pid}": str(self.process.pid),
            "{tcp}": str(self.tcp.getsockname()[1]),
            "{udp}": str(self.udp.getsockname()[1]),
            "{unix}": self.unix.getsockname()[1:].decode(),
        }
        for place, text in places.items():
            source = source.replace(place, text)
        return source


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Victim]:
    # Folders of programs are made there.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with tempfile.TemporaryDirectory(prefix="rlctl-victim-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / CANARY).write_text("unchanged")
        (folder / CANARY).chmod(0o666)
        process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(900)"], cwd=folder)
        tcp = socket.create_server(("127.0.0.1", 0))
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(f"\0rlctl-victim-{os.getpid()}")
        unix.listen()
        yield Victim(folder, process, tcp, udp, unix)
        process.kill()
        process.wait()
        for each in (tcp, udp, unix):
            each.close()


def digest_machine(victim: Victim) -> str:
    """Return a digest of the files that no program may change, and of the names in their folders."""
    digest = hashlib.sha256()
    for name in (*WATCHED_FILES, victim.folder / CANARY):
        path = Path(name)
        if path.exists():
            digest.update(path.read_bytes())
            digest.update(f"{path.stat().st_mode} {path.stat().st_uid}".encode())
    for name in (*WATCHED_FOLDERS, victim.folder):
        if Path(name).is_dir():
            digest.update("\n".join(sorted(os.listdir(name))).encode())
    return digest.hexdigest()


def find_left(token: str) -> list[str]:
    """Return the commands of processes that have the token in their environment."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and token in process.environ().get("RLCTL_HOSTILE", ""):
                left.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return left


def run_hostile(sandbox: Sandbox, program: HostileProgram, victim: Victim) -> str:
    """Run a program; return how it was not contained, empty if it was."""
    start = time.monotonic()
    result: Result = sandbox.run(
        Program(source=victim.place(program.source), outputs=("out",), variables={"RLCTL_HOSTILE": victim.token}),
        LIMITS,
    )
    seconds = time.monotonic() - start
    problems = []
    if ESCAPED.encode() in result.stdout:
        problems.append(f"escaped: {result.stdout[:200]!r}")
    if b"unchanged" in result.stdout or any(b"unchanged" in content for content in result.files.values()):
        problems.append("read the canary")
    if seconds > LIMITS.wall_s + SPARE_S:
        problems.append(f"took {seconds:.1f} s")
    if len(result.stdout) + len(result.stderr) > LIMITS.output_bytes:
        problems.append("wrote too much")
    if result.memory_bytes > (LIMITS.memory_mib << 20) + SPARE_BYTES:
        problems.append(f"had {result.memory_bytes >> 20} MiB")
    return "; ".join(problems)


def run_all(kind: SandboxName, programs: Sequence[HostileProgram], victim: Victim) -> dict[str, str]:
    """Run programs, four at a time; return name -> how it was not contained."""
    sandbox = local_sandbox(kind)
    if absent := [name for name, strength in sandbox.isolation.items() if strength == "absent"]:
        # They would signal every process of this user.
        pytest.skip(f"{kind} does not hold {', '.join(absent)} on this kernel")
    before = digest_machine(victim)
    with ThreadPoolExecutor(4) as threads:
        problems = list(threads.map(lambda program: run_hostile(sandbox, program, victim), programs))
    breaches = {program.name: problem for program, problem in zip(programs, problems, strict=True) if problem}
    assert digest_machine(victim) == before
    assert psutil.Process(victim.process.pid).status() == psutil.STATUS_SLEEPING
    assert find_left(victim.token) == []
    assert list(Path(tempfile.gettempdir()).glob("rlctl-program-*")) == []
    victim.tcp.settimeout(0)
    victim.udp.settimeout(0)
    victim.unix.settimeout(0)
    for receive in (victim.tcp.accept, victim.unix.accept, lambda: victim.udp.recv(9)):
        with pytest.raises(BlockingIOError):
            receive()
    return breaches


def test_there_are_two_hundred_programs() -> None:
    names = [program.name for program in HOSTILE_PROGRAMS]
    assert len(names) == len(set(names)) >= 200


@pytest.mark.parametrize("kind", LOCAL_KINDS)
def test_some_of_each_sort_are_contained(kind: SandboxName, victim: Victim) -> None:
    assert run_all(kind, HOSTILE_PROGRAMS[5::24], victim) == {}


@pytest.mark.long  # two minutes: each one
@pytest.mark.parametrize("kind", LOCAL_KINDS)
def test_all_hostile_programs_are_contained_or_named(kind: SandboxName, victim: Victim) -> None:
    breaches = run_all(kind, HOSTILE_PROGRAMS, victim)
    assert breaches.keys() == NOT_CONTAINED[kind].keys(), breaches
