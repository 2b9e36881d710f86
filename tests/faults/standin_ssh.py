"""Stands in for ssh where a real one adds nothing: a host's name tells its defect. Everything else is real: the
programs on hosts, Ray, processes, files.
"""

import os
import tempfile
from pathlib import Path

from tests.system.clusters import Clusters, processes_of

SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
host=$2
shift 2
export SSH_CONNECTION="127.0.0.1 1 10.9.9.9 22"
starts() { cat > $PARTS/program.$$; grep -q "reply = start(" $PARTS/program.$$; }
case $host in
  fast | newer | older | oldray | nopsutil) export PYTHONPATH=$PARTS/$host:$PYTHONPATH ;;
  full) export TMPDIR=$SMALL ;;
  readonly) cd /proc && exec unshare -m sh -c "$READONLY $*" ;;
  nokey) echo "me@nokey: Permission denied (publickey)." >&2; exit 255 ;;
  down) echo "ssh: connect to host down port 22: Connection timed out" >&2; exit 255 ;;
  breaks)
    if starts; then
      sh -c "$*" < $PARTS/program.$$ > /dev/null
      echo "Timeout, server breaks not responding." >&2
      exit 255
    fi
    exec sh -c "$*" < $PARTS/program.$$ ;;
  waits)
    if starts; then
      touch $PARTS/waiting
      until [ -e $PARTS/go ]; do sleep 0.1; done
    fi
    exec sh -c "$*" < $PARTS/program.$$ ;;
esac
exec sh -c "$*"
"""
# Makes every possible temporary folder read-only, as on a host whose disk was remounted after an error.
READONLY = """for folder in /tmp /var/tmp $TMPDIR; do
  mount --bind $folder $folder && mount -o remount,ro,bind $folder || exit 9
done;"""
CLOCK = "import time\nreal = time.time\ntime.time = lambda: real() + 100\n"
PYTHON = "import sys\nsys.version_info = ({}, 2, 'final', 0)\n"


class StandInClusters(Clusters):
    """Clusters over a stand-in for ssh, with all files of nodes below `root`."""

    def __init__(self, home: Path) -> None:
        self.parts = home / "parts"
        self.parts.mkdir()
        # The path is short, because Ray creates Unix sockets below it, whose paths have a length limit.
        self.root = Path(tempfile.mkdtemp(prefix="rlf-", dir="/tmp"))
        program = self.parts / "bin" / "ssh"
        program.parent.mkdir()
        program.write_text(SSH)
        program.chmod(0o755)
        for host, text in (("fast", CLOCK), ("newer", PYTHON.format("3, 99")), ("older", PYTHON.format("3, 9"))):
            (self.parts / host).mkdir()
            (self.parts / host / "sitecustomize.py").write_text(text)
        self._install("oldray", "ray", "2.48.0")
        self._install("nopsutil", "psutil", None)
        path = f"{program.parent}:{os.environ['PATH']}"
        places = {"PARTS": str(self.parts), "TMPDIR": str(self.root), "READONLY": READONLY}
        super().__init__(home, PATH=path, **places)

    def leftovers(self) -> list[object]:
        """Return the processes, node files and cluster states that are left."""
        leftovers: list[object] = [*processes_of([str(self.root)]), *self.root.iterdir()]
        states = (self.home / "state" / "rlctl" / "clusters").glob("*/*")
        leftovers += [state for state in states if state.name != "logs"]
        return leftovers

    def clean(self) -> None:
        super().clean()
        self.root.rmdir()

    def _install(self, host: str, package: str, version: str | None) -> None:
        """Install another version of a package on a host, which hides this machine's. None: a broken package."""
        folder = self.parts / host / f"{package}-{version or 0}.dist-info"
        folder.mkdir(parents=True)
        if version:
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
