"""Refused connections between a real ssh and a real sshd: rlctl reports each cause in one line."""

import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.utils.ports import free_port
from tests.system.clusters import Clusters
from tests.system.ssh_hosts import SSHD
from tests.waiting import until

MAX_STARTUPS = 2
FEW = f"""
ListenAddress 127.0.0.1
MaxStartups {MAX_STARTUPS}:100:{MAX_STARTUPS}
LoginGraceTime 600
"""
CLIENT = """
Host here
  HostName 127.0.0.1
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
  LogLevel ERROR
"""


class LocalHost:
    """This machine as the host `here`, reached over an sshd that the test started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("host_key", "key", "other"):
            generate = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
            subprocess.run(generate, check=True)
        (folder / "sshd_config").write_text(SSHD.format(folder=folder) + FEW)
        self.port = free_port()
        self.config = folder / "ssh_config"
        shutil.copy(folder / "key.pub", folder / "key.pub.bak")
        Path("/run/sshd").mkdir(exist_ok=True)
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        command = [sshd, "-D", "-e", "-f", str(folder / "sshd_config"), "-p", str(self.port)]
        self.daemon = subprocess.Popen(command, stderr=(folder / "sshd.log").open("wb"))
        self.begin_anew()

    def begin_anew(self) -> None:
        """Undo the changes of the test before, and wait until ssh can log in."""
        shutil.copy(self.folder / "key.pub.bak", self.folder / "key.pub")
        self.config.write_text(CLIENT.format(folder=self.folder) + f"  Port {self.port}\n")
        self.set_known_key("host_key")
        enter = ["ssh", "-F", str(self.config), "here", "true"]
        until(lambda: not subprocess.run(enter, capture_output=True).returncode, (self.folder / "sshd.log").read_text)

    def set_known_key(self, name: str) -> None:
        """Write the key `name` as the host's key into ssh's list of known hosts."""
        key = " ".join((self.folder / f"{name}.pub").read_text().split()[:2])
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {key}\n")

    @contextlib.contextmanager
    def fill_connections(self) -> Iterator[None]:
        """Hold every connection that the sshd grants before a login: a banner says that one is granted.

        A connection of an earlier test may still hold one, for as long as the sshd takes to notice its end.
        """
        connections: list[socket.socket] = []

        def has_all() -> bool:
            connection = socket.create_connection(("127.0.0.1", self.port), timeout=300)
            with contextlib.suppress(ConnectionResetError):
                if connection.recv(4) == b"SSH-":
                    connections.append(connection)
                    return len(connections) == MAX_STARTUPS
            connection.close()
            return False

        try:
            until(has_all, (self.folder / "sshd.log").read_text)
            yield
        finally:
            for connection in connections:
                connection.close()

    def try_up(self) -> str:
        """Return the line of a refused `up` that names this host."""
        clusters = Clusters(self.folder)
        options = f"ssh_options=[-F, {self.config}]"
        _, err = clusters.run("up", "ssh", "hosts=[here]", f"python={sys.executable}", options, "port=0", code=1)
        assert not clusters.folder("ssh").exists()
        lines = [line for line in err.splitlines() if line.startswith("failed")]
        assert len(lines) == 1, err
        return lines[0]


@pytest.fixture(scope="module")
def host_of_all_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHost]:
    missing = [name for name in ("ssh", "ssh-keygen") if not shutil.which(name)]
    if missing or not (shutil.which("sshd") or Path("/usr/sbin/sshd").exists()):
        pytest.skip("no ssh and sshd here")
    try:
        Path("/run/sshd").mkdir(exist_ok=True)
    except PermissionError:
        pytest.skip("sshd needs /run/sshd")
    host = LocalHost(tmp_path_factory.mktemp("sshd"))
    yield host
    host.daemon.terminate()
    host.daemon.wait()


@pytest.fixture
def host(host_of_all_tests: LocalHost) -> LocalHost:
    """Return the host in its first state, after any other test."""
    host_of_all_tests.begin_anew()
    return host_of_all_tests


def test_a_host_key_that_is_not_known(host: LocalHost) -> None:
    (host.folder / "known_hosts").write_text("")
    assert host.try_up() == "failed  here: host key not known: run `ssh here` once by hand and accept it"


def test_a_host_key_that_has_changed(host: LocalHost) -> None:
    host.set_known_key("other")
    fault = "host key changed: if that is right, ssh-keygen -R its name; ssh says more by hand"
    assert host.try_up() == f"failed  here: {fault}"


def test_a_key_that_is_not_accepted(host: LocalHost) -> None:
    (host.folder / "key.pub").write_text((host.folder / "other.pub").read_text())
    fault = "key not accepted: try `ssh here` by hand, add your key with ssh-copy-id or ssh-add"
    assert host.try_up() == f"failed  here: {fault}"


def test_an_sshd_that_takes_no_more_connections(host: LocalHost) -> None:
    fault = "its sshd took no more connections (MaxStartups): try again, or raise it there"
    with host.fill_connections():
        assert host.try_up() == f"failed  here: {fault}"


def test_no_sshd_at_its_port(host: LocalHost) -> None:
    text = host.config.read_text()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        host.config.write_text(text.replace(f"Port {host.port}", f"Port {unused.getsockname()[1]}"))
        assert host.try_up() == "failed  here: nothing answers at its ssh port: is sshd running there?"
