"""The folder that a job's nodes and this machine share."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from rlctl.cluster.hosts import whole
from rlctl.cluster.slurm.batch import PROGRAMS
from rlctl.cluster.state import ClusterError

_NOISE = ("srun:", "slurmstepd", "Terminated")


class JobFolder:
    """`path` and what is in it."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.script, self.logs = self.path / "job.sh", self.path / "logs"

    def make(self) -> None:
        """Raises ClusterError unless it is new, and nobody else's to read."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
            for name in ("remote_scripts", "nodes", "logs/job"):
                (self.path / name).mkdir(parents=True)
        except FileExistsError:
            what = f"{self.path} is there already: remove it if no cluster uses it, or set another shared_folder"
            raise ClusterError(what) from None
        except OSError as error:
            raise ClusterError(f"{self.path} cannot be made: {error.strerror}; set another shared_folder") from None

    def fill(self, script: str, plan: dict[str, Any], token: str) -> None:
        """What the job is to find."""
        _private(self.script, script, 0o700)
        _private(self.path / "plan.json", json.dumps(plan, indent=1))
        _private(self.path / "token", token)
        for name in PROGRAMS:
            _private(self.path / "remote_scripts" / f"{name}.py", whole(name))

    def cards(self) -> dict[int, dict[str, Any]]:
        """What the nodes have said so far, by their number in the job."""
        found = {}
        # Listed and not looked for by name: a file server's clients remember for long that a name was not there.
        for path in sorted((self.path / "nodes").glob("*.json")):
            found[int(path.stem)] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def last_words(self) -> str:
        """The last line of the job's own log."""
        try:
            text = (self.logs / "job" / "start.log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        if found := re.search(r"execve\(\): (\S+): No such file|(\S+): (?:command not found|No such file)", text):
            return f"not found on the nodes: {found[1] or found[2]}; set python=... to one that has ray and rlctl"
        # Slurm's own lines come last, and say what is known already.
        said = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_NOISE)]
        return said[-1] if said else ""

    def uncleared(self) -> list[str]:
        """A line a node that did not say that it has cleared up, once the job is over."""
        lines = []
        for card in self.cards().values():
            if "folder" not in card:
                continue
            if "ended" not in card:
                lines.append(f"{card['name']}: ended without clearing up: look for {card['folder']} there")
            elif left := card["ended"]["left"]:
                lines.append(f"{card['name']}: processes {', '.join(map(str, left))} would not end")
        return lines

    def remove(self, logs: Path) -> None:
        """All of it, but for the logs, which go to `logs`."""
        if not self.path.is_dir():
            return
        for source in self.logs.iterdir() if self.logs.is_dir() else ():
            if any(source.iterdir()):
                shutil.rmtree(logs / source.name, ignore_errors=True)
                logs.mkdir(mode=0o700, exist_ok=True)
                shutil.move(source, logs / source.name)
        shutil.rmtree(self.path)


def _private(path: Path, text: str, mode: int = 0o600) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
