"""The probe finds the same guarantees for root and for another user, with and without namespaces of users."""

import ctypes
import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.unit.sandbox.kinds import local_sandbox

pytestmark = [
    pytest.mark.long,  # half a minute; the probe itself is tested elsewhere
    pytest.mark.skipif(os.geteuid() != 0, reason="root becomes other users"),
]
ROOT = Path(__file__).parents[2]
OTHER_USER = 4242
NEW_USER_NAMESPACE = 0x10000000
ALL_ENFORCED = "network, files, processes, forks enforced; memory watched"
FORKS_WATCHED = "network, files, processes enforced; memory, forks watched"
# Other users can then read the interpreter in root's home.
OPEN_HOME = """
home=$(mktemp -d); mount --rbind {base} $home; mount -t tmpfs -o mode=755 none /root
mkdir -p {base}; mount --rbind $home {base}; cd /tmp
"""
AS_ROOT = "env -i PATH=/usr/bin:/bin HOME=/tmp PYTHONPATH={root} {python} -m tests.faults.probe_here"
AS_OTHER = "setpriv --reuid {user} --regid {user} --clear-groups"
NO_NAMESPACES = "echo 0 > /proc/sys/user/max_user_namespaces"
NO_ADMIN = "setpriv --bounding-set=-sys_admin --inh-caps=-all"


def run_script(script: str, in_namespace: bool) -> dict[str, str]:
    """Run a script with own mounts; return kind -> finding. in_namespace: in a namespace of users with all ids."""
    values = {"root": ROOT, "python": sys.executable, "user": OTHER_USER, "base": Path(sys.base_prefix).resolve()}
    command = ["unshare", "-m", "sh", "-ec", script.format(**values)]
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            if in_namespace:
                ctypes.CDLL(None).unshare(NEW_USER_NAMESPACE)
                # Stop, until the parent has written the map of ids.
                os.kill(os.getpid(), 19)
                os.setgid(0)
                os.setuid(0)
            os.execvp(command[0], command)
        if in_namespace:
            os.waitpid(pid, os.WUNTRACED)
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{pid}/{name}").write_text("0 0 4294967295")
            os.kill(pid, 18)
        os.waitpid(pid, 0)
        output.seek(0)
        lines = output.read().decode().splitlines()
    return {kind: finding for kind, _, finding in (line.partition(": ") for line in lines)}


def test_root_and_another_user_have_both_sandboxes() -> None:
    local_sandbox("bwrap")
    assert run_script(AS_ROOT, in_namespace=False) == {"bwrap": ALL_ENFORCED, "process": ALL_ENFORCED}
    script = f"{OPEN_HOME}{AS_OTHER} {AS_ROOT}"
    assert run_script(script, in_namespace=False) == {"bwrap": ALL_ENFORCED, "process": FORKS_WATCHED}


def test_without_namespaces_of_users_root_has_both_and_another_user_has_one() -> None:
    local_sandbox("bwrap")
    limit = Path("/proc/sys/user/max_user_namespaces").read_text()
    script = f"{NO_NAMESPACES}\n{OPEN_HOME}{AS_ROOT}"
    assert run_script(script, in_namespace=True) == {"bwrap": ALL_ENFORCED, "process": ALL_ENFORCED}
    findings = run_script(f"{NO_NAMESPACES}\n{OPEN_HOME}{AS_OTHER} {AS_ROOT}", in_namespace=True)
    assert findings["process"] == FORKS_WATCHED
    assert "Creating new namespace failed" in findings["bwrap"]
    # The limit was one of the namespace.
    assert Path("/proc/sys/user/max_user_namespaces").read_text() == limit


def test_a_container_without_the_right_to_mount_has_one_sandbox() -> None:
    local_sandbox("bwrap")
    findings = run_script(f"{NO_ADMIN} {AS_ROOT}", in_namespace=False)
    assert findings["process"] == ALL_ENFORCED
    assert "Operation not permitted" in findings["bwrap"]
