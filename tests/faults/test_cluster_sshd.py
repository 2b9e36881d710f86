"""What a real sshd and a real ssh say when they do not agree, in a line of ours each."""

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.clusters import Clusters
from tests.system.ssh_hosts import SSHD

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


class Here:
    """This machine as the host `here`, by an sshd of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("host_key", "key", "other"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
            subprocess.run(command, check=True)
        (folder / "sshd_config").write_text(SSHD.format(folder=folder) + FEW)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.config = folder / "ssh_config"
        self.config.write_text(CLIENT.format(folder=folder) + f"  Port {self.port}\n")
        self.knows("host_key")
        Path("/run/sshd").mkdir(exist_ok=True)
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        command = [sshd, "-D", "-e", "-f", str(folder / "sshd_config"), "-p", str(self.port)]
        self.daemon = subprocess.Popen(command, stderr=(folder / "sshd.log").open("wb"))
        end = time.monotonic() + 30
        while subprocess.run(["ssh", "-F", str(self.config), "here", "true"], capture_output=True).returncode:
            assert time.monotonic() < end, (folder / "sshd.log").read_text()
            time.sleep(0.1)

    def knows(self, name: str) -> None:
        """What ssh takes for the host's key."""
        key = " ".join((self.folder / f"{name}.pub").read_text().split()[:2])
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {key}\n")

    def filled(self) -> list[socket.socket]:
        """Hold every connection that the sshd grants before a login: a banner says that one is granted.

        A connection of an earlier test may still hold one, for as long as the sshd takes to notice its end.
        """
        held: list[socket.socket] = []
        end = time.monotonic() + 60
        while len(held) < MAX_STARTUPS:
            assert time.monotonic() < end, (self.folder / "sshd.log").read_text()
            other = socket.create_connection(("127.0.0.1", self.port), timeout=30)
            with contextlib.suppress(ConnectionResetError):
                if other.recv(4) == b"SSH-":
                    held.append(other)
                    continue
            other.close()
            time.sleep(0.1)
        return held

    def refused(self) -> str:
        """What `up` says."""
        clusters = Clusters(self.folder)
        options = f"ssh_options=[-F, {self.config}]"
        _, err = clusters.run("up", "ssh", "hosts=[here]", f"python={sys.executable}", options, "port=0", code=1)
        assert not clusters.folder("ssh").exists()
        (line,) = [line for line in err.splitlines() if line.startswith("failed")]
        return line


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    missing = [name for name in ("ssh", "ssh-keygen") if not shutil.which(name)]
    if missing or not (shutil.which("sshd") or Path("/usr/sbin/sshd").exists()):
        pytest.skip("no ssh and sshd here")
    try:
        Path("/run/sshd").mkdir(exist_ok=True)
    except PermissionError:
        pytest.skip("sshd needs /run/sshd")
    here = Here(tmp_path_factory.mktemp("sshd"))
    yield here
    here.daemon.terminate()
    here.daemon.wait()


def test_a_host_key_that_is_not_known(here: Here) -> None:
    (here.folder / "known_hosts").write_text("")
    assert here.refused() == "failed  here: host key not known: run `ssh here` once by hand and accept it"
    here.knows("host_key")


def test_a_host_key_that_has_changed(here: Here) -> None:
    here.knows("other")
    said = "host key changed: if that is right, ssh-keygen -R its name; ssh says more by hand"
    assert here.refused() == f"failed  here: {said}"
    here.knows("host_key")


def test_a_key_that_is_not_accepted(here: Here) -> None:
    allowed = here.folder / "key.pub"
    text = allowed.read_text()
    allowed.write_text((here.folder / "other.pub").read_text())
    said = "key not accepted: try `ssh here` by hand, add your key with ssh-copy-id or ssh-add"
    assert here.refused() == f"failed  here: {said}"
    allowed.write_text(text)


def test_an_sshd_that_takes_no_more_connections(here: Here) -> None:
    others = here.filled()
    said = "its sshd took no more connections (MaxStartups): try again, or raise it there"
    assert here.refused() == f"failed  here: {said}"
    for other in others:
        other.close()


def test_no_sshd_at_its_port(here: Here) -> None:
    text = here.config.read_text()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        here.config.write_text(text.replace(f"Port {here.port}", f"Port {unused.getsockname()[1]}"))
        assert here.refused() == "failed  here: nothing answers at its ssh port: is sshd running there?"
    here.config.write_text(text)
