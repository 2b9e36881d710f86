"""Probe of a sandbox: hostile programs, whose effect is looked for on this machine.

Each program bounds itself to 300 forks and 400 MiB of memory. So it does no harm where a sandbox holds nothing.
"""

import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlctl.sandbox.base import GUARANTEES, Ending, Guarantee, Limits, Program, Result, Sandbox, SandboxError, Strength

_LIMITS = Limits(wall_s=20.0, cpu_s=10.0, memory_mib=128, processes=64, output_bytes=1 << 16, files_mib=16)
# Forks above the limit that count as held: threads of the sandbox's own programs.
_SPARE_FORKS = 8
_FORKS = 300
_ALLOCATIONS = 6
_ALLOCATED_MIB = 64
# Seconds until everything of a program must be gone.
_GONE_S = 1.0

_ATTACK = """
import json, os, signal, socket, sys
targets = json.load(open("targets.json"))
done = {}
def attempt(name, action):
    try:
        done[name] = action() or "done"
    except BaseException as error:
        done[name] = "refused: " + type(error).__name__
def connect():
    socket.create_connection(("127.0.0.1", targets["tcp"]), timeout=2).close()
def send():
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"probe", ("127.0.0.1", targets["udp"]))
def connect_abstract():
    socket.socket(socket.AF_UNIX).connect(chr(0) + targets["unix"])
attempt("tcp", connect)
attempt("udp", send)
attempt("unix", connect_abstract)
attempt("write", lambda: open(targets["folder"] + "/written", "w").close())
attempt("chmod", lambda: os.chmod(targets["folder"] + "/mode", 0o777))
attempt("read", lambda: open(targets["folder"] + "/secret").read())
attempt("environ", lambda: open("/proc/%d/environ" % targets["pid"]).read())
attempt("signal", lambda: os.kill(targets["pid"], signal.SIGKILL))
print(json.dumps(done))
"""
_ALLOCATE = f"""
import os, sys, time
pids = []
for number in range({_ALLOCATIONS}):
    reader, writer = os.pipe()
    if os.fork() == 0:
        memory = bytearray({_ALLOCATED_MIB} << 20)
        for page in range(0, len(memory), 4096):
            memory[page] = 1
        os.write(writer, b"x")
        time.sleep(3)
        os._exit(0)
    os.close(writer)
    if os.read(reader, 1):
        pids.append(number)
        print(len(pids), flush=True)
time.sleep(0.5)
"""
_FORK = f"""
import os, sys
count = 0
for number in range({_FORKS}):
    try:
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", sys.argv[1]])
    except OSError:
        break
    count += 1
    if count % 8 == 0:
        print(count, flush=True)
print(count, flush=True)
"""


@dataclass(frozen=True)
class ProbeReport:
    """Findings of a probe."""

    strengths: Mapping[Guarantee, Strength]
    # Broken guarantee -> the act of a program.
    breaches: Mapping[Guarantee, str]

    def describe(self) -> str:
        """Return the strengths in one line: `network, files enforced; memory watched`."""
        by_strength = dict[Strength, list[str]]()
        for guarantee in GUARANTEES:
            by_strength.setdefault(self.strengths[guarantee], []).append(guarantee)
        return "; ".join(f"{', '.join(names)} {strength}" for strength, names in by_strength.items())


def probe(sandbox: Sandbox) -> ProbeReport:
    """Run the hostile programs. Raises SandboxError if the sandbox itself fails."""
    claims = sandbox.isolation
    breaches = dict[Guarantee, str]()
    if "elsewhere" not in claims.values():
        breaches |= _attack_machine(sandbox)
        breaches |= _allocate_memory(sandbox)
        breaches |= _fork_processes(sandbox)
    strengths: dict[Guarantee, Strength] = {name: claims[name] for name in GUARANTEES}
    strengths |= dict.fromkeys(breaches, "absent")
    return ProbeReport(strengths, breaches)


def _attack_machine(sandbox: Sandbox) -> dict[Guarantee, str]:
    """Let a program try to reach this machine's network, files and processes. Return what it reached."""
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        # Any user may write there: only the sandbox keeps a program out.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlctl-probe-")))
        folder.chmod(0o777)
        (folder / "secret").write_text(token)
        (folder / "secret").chmod(0o644)
        (folder / "mode").touch(mode=0o600)
        user = os.geteuid()
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{token}")
        abstract.listen()
        victim = stack.enter_context(
            subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], env={"TOKEN": token})
        )
        stack.callback(victim.kill)
        targets = {
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "unix": token,
            "folder": str(folder),
            "pid": victim.pid,
        }
        program = Program(source=_ATTACK, files={"targets.json": json.dumps(targets).encode()})
        result = sandbox.run(program, _LIMITS)
        if not result.has_passed:
            raise SandboxError(f"the probe did not run: {_last_line(result)}")
        output = result.stdout.decode(errors="replace")
        reached = select.select([tcp, udp, abstract], [], [], 0.05)[0]
        breaches = dict[Guarantee, str]()
        if reached:
            names = {tcp: "TCP", udp: "UDP", abstract: "a socket without a file"}
            breaches["network"] = f"a program reached {', '.join(names[server] for server in reached)} of this machine"
        if (folder / "written").exists():
            breaches["files"] = "a program wrote outside its folder"
        elif (folder / "mode").stat().st_mode & 0o777 != 0o600 and user:
            breaches["files"] = "a program changed a file's mode outside its folder"
        elif json.loads(output)["read"] == token:
            breaches["files"] = "a program read a file outside its folder"
        if victim.poll() is not None:
            breaches["processes"] = "a program ended a process of this machine"
        elif token in str(json.loads(output)["environ"]):
            breaches["processes"] = "a program read the environment of a process of this machine"
        return breaches


def _allocate_memory(sandbox: Sandbox) -> dict[Guarantee, str]:
    """Let several processes use more memory together than the limit, each less than that."""
    result = sandbox.run(Program(source=_ALLOCATE), _LIMITS)
    used_mib = _last_number(result) * _ALLOCATED_MIB
    if result.ending is Ending.MEMORY or used_mib <= _LIMITS.memory_mib:
        return {}
    return {"memory": f"processes had {used_mib} MiB together, with a limit of {_LIMITS.memory_mib}"}


def _fork_processes(sandbox: Sandbox) -> dict[Guarantee, str]:
    """Let a program fork more than its limit, and leave the processes behind."""
    # The marker is the number of seconds that they sleep.
    marker = f"4{secrets.randbelow(10**9):09}"
    program = Program(argv=("python", "fork.py", marker), files={"fork.py": _FORK.encode()})
    result = sandbox.run(program, _LIMITS)
    count = _last_number(result)
    deadline = time.monotonic() + _GONE_S
    left_pids = find_processes(marker)
    while left_pids and time.monotonic() < deadline:
        time.sleep(0.05)
        left_pids = find_processes(marker)
    for pid in left_pids:
        with contextlib.suppress(OSError):
            os.kill(pid, 9)
    if left_pids:
        return {"forks": f"{len(left_pids)} processes outlived their program by {_GONE_S:g} s"}
    if result.ending is not Ending.PROCESSES and count > _LIMITS.processes + _SPARE_FORKS:
        return {"forks": f"a program had {count} processes, with a limit of {_LIMITS.processes}"}
    return {}


def find_processes(word: str) -> list[int]:
    """Return the processes of this machine with a word in their command."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            # A process may end meanwhile.
            with contextlib.suppress(OSError):
                if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                    pids.append(int(name))
    return pids


def _last_number(result: Result) -> int:
    """Return the last whole number that a program printed; 0 if none."""
    for line in reversed(result.stdout.split()):
        if line.isdigit():
            return int(line)
    return 0


def _last_line(result: Result) -> str:
    text = result.stderr.decode(errors="replace").strip()
    return text.splitlines()[-1][-300:] if text else str(result.ending)
