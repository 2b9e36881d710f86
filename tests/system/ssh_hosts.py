"""Several real hosts on one machine: network namespaces with separate addresses, an sshd in each. They share the file
system, the clock and the processes of this machine, but not its network.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SSHD = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
"""
CLIENT = """
Host {names}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
  LogLevel ERROR
"""


class SshHosts:
    """`names[i]` is a host at `addresses[i]`, reached with `ssh -F config NAME` from this machine."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        tag = f"{os.getpid() % 10000}"
        self._bridge = f"rlb{tag}"
        self._spaces = [f"rl{tag}n{index}" for index in range(count)]
        net = f"10.231.{os.getpid() % 250}"
        self._gateway = f"{net}.254"
        self.addresses = [f"{net}.{index + 1}" for index in range(count)]
        self.names = [f"host{index}" for index in range(count)]
        self.config = folder / "ssh_config"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Make keys, namespaces and daemons. Raises CalledProcessError where the system permits no namespaces."""
        for name in ("host_key", "key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        (self.folder / "sshd_config").write_text(SSHD.format(folder=self.folder))
        entries = CLIENT.format(names=" ".join(self.names), folder=self.folder)
        for name, address in zip(self.names, self.addresses):
            entries += f"Host {name}\n  HostName {address}\n"
        self.config.write_text(entries)
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "address", "add", f"{self._gateway}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        Path("/run/sshd").mkdir(exist_ok=True)
        for index, (space, address) in enumerate(zip(self._spaces, self.addresses)):
            self._make_host(space, address, index)

    def _make_host(self, space: str, address: str, index: int) -> None:
        outside = self.cable(index)
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "set", outside, "master", self._bridge, "up")
        _run("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        log = (self.folder / f"sshd-{index}.log").open("wb")
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        command = [*self.inside(index), sshd, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        self._daemons.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))

    def wait(self) -> None:
        """Wait until every host answers."""
        for name in self.names:
            end = time.monotonic() + 30
            while subprocess.run(["ssh", "-F", str(self.config), name, "true"], capture_output=True).returncode:
                assert time.monotonic() < end, f"{name} does not answer"
                time.sleep(0.2)

    def inside(self, index: int) -> list[str]:
        """Return the words to put in front of a command, so that it runs on host `index`."""
        return ["ip", "netns", "exec", self._spaces[index]]

    def cable(self, index: int) -> str:
        """Return the name of this machine's network interface to host `index`."""
        return f"{self._bridge}v{index}"

    def plug(self, index: int, state: str) -> None:
        """Set the state, up or down, of the network interface to host `index`. `down` cuts the host off."""
        _run("ip", "link", "set", self.cable(index), state)

    def stop(self) -> None:
        """End all daemons and remove all namespaces, also after a partial start."""
        for daemon in self._daemons:
            os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
        for space in self._spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True)


@contextmanager
def standing_hosts(folder: Path, count: int) -> Iterator[SshHosts]:
    """Yield `count` hosts that answer ssh within the block. Skip the test on a machine that cannot have such hosts."""
    if reason := why_not():
        pytest.skip(reason)
    hosts = SshHosts(folder, count)
    try:
        try:
            hosts.start()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        hosts.wait()
        yield hosts
    finally:
        hosts.stop()


def why_not() -> str:
    """Return the reason why this machine cannot have such hosts; empty if it can."""
    missing = [name for name in ("ip", "ssh", "ssh-keygen") if not shutil.which(name)]
    if not shutil.which("sshd") and not Path("/usr/sbin/sshd").exists():
        missing.append("sshd (apt-get install openssh-server)")
    if missing:
        return f"not installed: {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "network namespaces need root"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
