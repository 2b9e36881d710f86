"""Runs a program of `on_host/` on a machine, this one or another, and brings back its answer.

The program's source and its request go through the standard input of a Python there: nothing need be installed for
it, and what is secret in a request (the token) stands on no command line and in no file of ours.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROGRAMS = Path(__file__).parent / "on_host"
_SHARED = re.compile(r"^from rlctl\.cluster\.fleet\.on_host\.(\w+) import .*$", re.MULTILINE)
_MARK = "@rlctl "
_RUN = """
try:
    reply = run(json.loads({request!r}))
except Exception as error:
    reply = {{"error": "%s: %s" % (type(error).__name__, error)}}
print({mark!r} + json.dumps(reply), flush=True)
"""
# What ssh says, and what a person does about it; of several that it says, the first here.
_SSH_SAYS = {
    "Permission denied": "key not accepted: try `ssh {host}` by hand, add your key with ssh-copy-id or ssh-add",
    "IDENTIFICATION HAS CHANGED": "host key changed: if that is right, ssh-keygen -R its name; ssh says more by hand",
    "Host key verification failed": "host key not known: run `ssh {host}` once by hand and accept it",
    "Could not resolve": "no such host: check the name, or add it to ~/.ssh/config",
    "Connection refused": "nothing answers at its ssh port: is sshd running there?",
    "timed out": "not reachable within the time for connecting",
    "No route to host": "not reachable: no route to it",
    "Network is unreachable": "not reachable: the network is down",
    "kex_exchange_identification": "its sshd took no more connections (MaxStartups): try again, or raise it there",
    "not responding": "the connection broke off: it no longer answers",
    "Connection reset": "the connection broke off: see `ssh {host}`",
    "Broken pipe": "the connection broke off: see `ssh {host}`",
    "Connection closed": "closed the connection: see `ssh {host}`",
    "closed by remote host": "closed the connection: see `ssh {host}`",
}


class HostError(Exception):
    """A host could not be asked, or its program failed. The message is one line without the host's name."""


@dataclass(frozen=True)
class Host:
    """A machine. ssh: None for this one, else the arguments of ssh before the host's name."""

    name: str
    python: str = sys.executable
    ssh: tuple[str, ...] | None = None

    def command(self) -> list[str]:
        """A Python there that reads its program from the standard input."""
        if self.ssh is None:
            return [self.python, "-"]
        python = self.python
        # Quoted for the shell over there, but for the home that it is to fill in.
        shown = f"~/{shlex.quote(python[2:])}" if python.startswith("~/") else shlex.quote(python)
        return ["ssh", "-T", "-o", "BatchMode=yes", *self.ssh, "--", self.name, f"{shown} -"]

    def run(
        self,
        program: str,
        request: dict[str, Any],
        deadline_s: float,
        running: "set[subprocess.Popen[str]] | None" = None,
    ) -> dict[str, Any]:
        """The answer of on_host/PROGRAM.py's run(request). Raises HostError. running: holds the process meanwhile."""
        process = self._started()
        held = running if running is not None else set()
        held.add(process)
        try:
            output, errors = process.communicate(script(program, request), timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise HostError(f"no answer within {deadline_s:g} s") from None
        finally:
            process.kill()
            process.wait()
            held.discard(process)
        answers = [line for line in output.splitlines() if line.startswith(_MARK)]
        if not answers:
            raise HostError(self._why(errors, process.returncode))
        reply: dict[str, Any] = json.loads(answers[-1].removeprefix(_MARK))
        if "error" in reply:
            raise HostError(reply["error"])
        return reply

    def follow(self, program: str, request: dict[str, Any]) -> "subprocess.Popen[str]":
        """The program with its output on ours, line by line, until it or this process ends."""
        process = subprocess.Popen(self.command(), stdin=subprocess.PIPE, start_new_session=True, text=True)
        assert process.stdin
        process.stdin.write(script(program, request, answer=False))
        process.stdin.close()
        return process

    def _started(self) -> "subprocess.Popen[str]":
        try:
            # In a session of its own: Ctrl-C is this process's to handle, so that no host is left half-way.
            return subprocess.Popen(
                self.command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                text=True,
                errors="replace",
            )
        except FileNotFoundError as error:
            raise HostError(f"{error.filename} is not installed on this machine") from None

    def _why(self, errors: str, code: int) -> str:
        if self.ssh is not None and code == 255:
            for says, meaning in _SSH_SAYS.items():
                if says in errors:
                    return meaning.format(host=self.name)
        if "SyntaxError" in errors:
            return f"wrong Python: {self.python} is too old to run a check; set python=..., 3.11 or newer"
        if code == 127 or "No such file" in errors:
            return f"no Python there: {self.python} not found; set python=... to one that has ray and rlctl"
        said = [line.strip() for line in errors.splitlines() if line.strip()]
        return said[-1] if said else f"ended with exit code {code} and said nothing"


def ssh_host(name: str, python: str, connect_timeout_s: int, options: list[str]) -> Host:
    """A host, to be reached with the user's own ssh, which gives up on a silent one."""
    alive = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
    return Host(name, python, ("-o", f"ConnectTimeout={connect_timeout_s}", *alive, *options))


def script(program: str, request: dict[str, Any], answer: bool = True) -> str:
    """The whole program as it goes through the standard input: what it imports of its folder stands in it."""
    source = _SHARED.sub(lambda found: _source(found[1]), _source(program))
    if not answer:
        return f"{source}\nrun(json.loads({json.dumps(request)!r}))\n"
    return source + _RUN.format(request=json.dumps(request), mark=_MARK)


def _source(program: str) -> str:
    return (_PROGRAMS / f"{program}.py").read_text(encoding="utf-8")


class Asking:
    """Several hosts asked at the same time: (host, program, request) each, in threads of their own."""

    def __init__(self, asked: Iterable[tuple[Host, str, dict[str, Any]]], deadline_s: float) -> None:
        listed = list(asked)
        self._running: set[subprocess.Popen[str]] = set()
        self._threads = ThreadPoolExecutor(max(1, min(64, len(listed))))
        self._futures = {
            self._threads.submit(host.run, program, request, deadline_s, self._running): index
            for index, (host, program, request) in enumerate(listed)
        }

    def answers(self) -> "Iterator[tuple[int, dict[str, Any] | HostError]]":
        """(place in what was asked, answer), as they come."""
        for future in as_completed(self._futures):
            error = future.exception()
            if error is not None and not isinstance(error, HostError):
                raise error
            yield self._futures[future], error if error is not None else future.result()

    def in_order(self) -> "list[dict[str, Any] | HostError]":
        """Every answer, once all are there."""
        answers = dict(self.answers())
        return [answers[index] for index in range(len(answers))]

    def finish(self) -> None:
        """Wait for those that run, and start no more."""
        self._threads.shutdown(cancel_futures=True)

    def cancel(self) -> None:
        """Stop asking."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            process.kill()
