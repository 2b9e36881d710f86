"""Runs `rlctl cluster` for a test, with separate state, processes and folders that the test can inspect."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil


class Clusters:
    """Runs `rlctl cluster` with its state in the test's folder. prefix: words in front of every command."""

    def __init__(self, home: Path, prefix: tuple[str, ...] = (), **environment: str) -> None:
        self.home = home
        self.prefix = prefix
        outside = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment = {**outside, "XDG_STATE_HOME": str(home / "state"), "COLUMNS": "80", **environment}
        self._processes: list[subprocess.Popen[str]] = []

    def popen(self, *arguments: str, group: str = "cluster") -> "subprocess.Popen[str]":
        """Start `rlctl GROUP ARGUMENTS` in the home of the test."""
        command = [*self.prefix, sys.executable, "-m", "rlctl.cli.main", group, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(  # type: ignore
            command, text=True, env=self.environment, start_new_session=True, cwd=self.home, **pipes
        )
        self._processes.append(process)
        return process

    def run(self, *arguments: str, code: int = 0, within_s: float = 500, group: str = "cluster") -> tuple[str, str]:
        """Run a command that must end with `code`; return its stdout and stderr."""
        process = self.popen(*arguments, group=group)
        out, err = process.communicate(timeout=within_s)
        assert process.returncode == code, f"{arguments}: {process.returncode}\n{out}\n{err}"
        return out, err

    def folder(self, name: str = "local") -> Path:
        return self.home / "state" / "rlctl" / "clusters" / name

    def state(self, name: str = "local") -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder(name) / "state.json").read_text())
        return state

    def drive(self, program: str, **environment: str) -> "subprocess.Popen[str]":
        """Start a Ray program in a shell that did `eval "$(rlctl cluster env)"`."""
        lines = self.run("env")[0].splitlines()
        exported = dict(line.removeprefix("export ").split("=", 1) for line in lines)
        command = [*self.prefix, sys.executable, "-c", program]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, env={**self.environment, **exported, **environment}, **pipes)  # type: ignore

    def clean(self) -> None:
        """End the clusters that a failed test left running."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        folder = self.home / "state" / "rlctl" / "clusters"
        for name in [path.parent.name for path in folder.glob("*/state.json")]:
            self.popen("down", name, "--forget").communicate(timeout=500)


def processes_of(folders: list[str]) -> list[int]:
    """Return the ids of processes that have one of the folders on their command line."""
    pids = []
    for process in psutil.process_iter():
        try:
            if any(folder in argument for argument in process.cmdline() for folder in folders):
                pids.append(process.pid)
        except psutil.Error:
            continue
    return pids


def gone(folders: list[str], within_s: float = 120) -> bool:
    """Return True if the folders and their processes are gone within `within_s` seconds."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not processes_of(folders) and not any(map(os.path.exists, folders)):
            return True
        time.sleep(0.2)
    return False
