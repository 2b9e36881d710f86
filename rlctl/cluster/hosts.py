"""Calls of the programs in `remote_scripts/` on a machine, this one or another reached by ssh, srun or kubectl.

A host has rlctl installed, and thus these programs. Only `check.py` is sent as text, because it reports whether rlctl
is installed. A request goes to the standard input of a Python process on the host, so a secret in a request (the token)
is on no command line and in no file.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_REPLY_MARK = "@rlctl "
# Seconds between the terminate and the kill of a link's process (ssh, srun or kubectl).
_TERM_S = 3.0
_RUN = """
import json
try:
    reply = {function}(json.loads({request!r}))
except Exception as error:
    reply = {{"error": "%s: %s" % (type(error).__name__, error)}}
print({mark!r} + json.dumps(reply), flush=True)
"""
# Text in a link's error output -> remedy. If several texts match, the first in this order counts.
_SSH_REMEDIES = {
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
_SRUN_REMEDIES = {
    "Invalid job id": "its job has ended",
    "already completing or completed": "its job has ended",
    "Unable to contact slurm controller": "Slurm's controller does not answer: see `scontrol ping`",
    "Unable to confirm allocation": "its job has ended, or Slurm's controller does not answer: see `squeue --me`",
    "Requested node configuration is not available": "its job no longer has this node",
    "Unable to create step": "Slurm gives its job no further step: see `scontrol show job`",
}
_KUBECTL_REMEDIES = {
    'cannot create resource "pods/exec"': "you may not run programs in its pods (pods/exec)",
    "NotFound": "its pod is gone",
    "dial tcp": "no cluster answers: see `kubectl cluster-info`",
}


class HostError(Exception):
    """A host could not be reached, or its program failed. The message is one line without the host's name."""


@dataclass(frozen=True)
class Host:
    """A machine on which programs are run."""

    name: str
    python: str = sys.executable
    # Command prefix that runs another command on the host, for example ssh NAME; empty for this machine.
    link: tuple[str, ...] = ()
    # True if the host's shell parses the command, so that it is passed as one text.
    shell: bool = False
    remedies: Mapping[str, str] = field(default_factory=dict)
    # Exit code by which the link says that it failed itself, for example 255 of ssh; None: the link has no such code.
    link_exit_code: int | None = None
    # Function that returns the environment for the link's process; None: this process's environment.
    environment: Callable[[], dict[str, str]] | None = None
    # Shell lines that run on the host before Python.
    setup: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Return the command that starts a Python on the host. Its program comes from the standard input."""
        if not self.link:
            return [self.python, "-"]
        text = f"{quoted_path(self.python)} -"
        if self.setup:
            # The setup must neither read the program from the standard input nor write among its replies.
            text = "\n".join(["{", *self.setup, "} </dev/null >&2", f"exec {text}"])
        if self.shell:
            return [*self.link, text]
        return [*self.link, "bash", "-c", text]

    def run(
        self,
        program: str,
        request: dict[str, Any],
        deadline_s: float,
        running: "set[subprocess.Popen[str]] | None" = None,
    ) -> dict[str, Any]:
        """Run a program on the host and return its reply. Raises HostError.

        program: for example `check.run`, the function `run` of `remote_scripts/check.py`. running: set that contains
        the link's process until it ends.
        """
        try:
            process = self._start_program(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except FileNotFoundError as error:
            raise HostError(f"{error.filename} is not installed on this machine") from None
        # Use the caller's set object, because the caller terminates the processes in the set.
        processes = running if running is not None else set()
        processes.add(process)
        try:
            output, errors = process.communicate(script(program, request), timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise HostError(f"no answer within {deadline_s:g} s") from None
        finally:
            end(process)
            processes.discard(process)
        answers = [line for line in output.splitlines() if line.startswith(_REPLY_MARK)]
        if not answers:
            raise HostError(self._explain_failure(errors, process.returncode))
        reply: dict[str, Any] = json.loads(answers[-1].removeprefix(_REPLY_MARK))
        if "error" in reply:
            raise HostError(reply["error"])
        return reply

    def follow(self, program: str, request: dict[str, Any], stdout: int | None = None) -> "subprocess.Popen[str]":
        """Start a program that prints lines, until the program or this process ends. Return the link's process.

        stdout: as for Popen; None: this process's output.
        """
        process = self._start_program(stdout=stdout, stderr=None if stdout is None else subprocess.DEVNULL)
        assert process.stdin
        function = program.rpartition(".")[2]
        process.stdin.write(f"{_program(program)}\nimport json\n{function}(json.loads({json.dumps(request)!r}))\n")
        process.stdin.close()
        return process

    def _start_program(self, **streams: Any) -> "subprocess.Popen[str]":
        """Start the Python that reads a program from its standard input. streams: arguments of Popen."""
        return subprocess.Popen(
            self.command(),
            stdin=subprocess.PIPE,
            # In a new session, so that Ctrl-C reaches only this process and no host is left in the middle of a change.
            start_new_session=True,
            text=True,
            errors="replace",
            env=self.environment() if self.environment else None,
            **streams,
        )

    def _explain_failure(self, errors: str, code: int) -> str:
        """Return in one line why a program gave no reply. errors: error output of the link and the program."""
        # The remedies are for a failed link. ssh has failed only if its own exit code came back; other links have none.
        may_be_link = self.link and self.link_exit_code in (None, code)
        remedy = remedy_of(errors, self.remedies) if may_be_link else None
        if remedy:
            return remedy.format(host=self.name)
        if "No module named 'rlctl" in errors:
            return f"rlctl is not installed for {self.python}: install it there, or set python=..."
        if "SyntaxError" in errors:
            return f"wrong Python: {self.python} is too old to run a check; set python=..., 3.11 or newer"
        if code == 127 or "No such file" in errors:
            return f"no Python there: {self.python} not found; set python=... to one that has ray and rlctl"
        return last_line(errors) or f"ended with exit code {code} and said nothing"


def ssh_host(name: str, python: str, connect_timeout_s: int, options: list[str]) -> Host:
    """Return a host reached by the user's ssh. ssh ends if the host is silent for 15 s."""
    alive = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
    command = ("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_timeout_s}", *alive, *options)
    return Host(name, python, (*command, "--", name), shell=True, remedies=_SSH_REMEDIES, link_exit_code=255)


def slurm_host(name: str, python: str, job: str, setup: list[str]) -> Host:
    """Return a node of a Slurm job, reached by a job step that overlaps other steps and requests no resources."""
    options = (f"--jobid={job}", f"--nodelist={name}", "--nodes=1", "--ntasks=1", "--mem=0", "--chdir=/")
    link = ("srun", "--overlap", "--quiet", *options, "--")
    return Host(name, python, link, remedies=_SRUN_REMEDIES, environment=slurm_environment, setup=tuple(setup))


def pod_host(name: str, python: str, context: str, namespace: str) -> Host:
    """Return a pod as a host, reached by the user's kubectl."""
    link = (*kubectl_command(context, namespace), "exec", "--stdin", "--quiet", name, "--")
    return Host(name, python, link, remedies=_KUBECTL_REMEDIES)


def slurm_environment() -> dict[str, str]:
    """Return this process's environment without Slurm's variables, which would make Slurm's commands act on another
    job.
    """
    return {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or name[:6] != "SLURM_"}


def kubectl_command(context: str, namespace: str) -> list[str]:
    """Return the kubectl command with context and namespace. Empty means kubectl's default."""
    chosen = {"context": context, "namespace": namespace}
    return ["kubectl", *(f"--{option}={value}" for option, value in chosen.items() if value)]


def remedy_of(errors: str, remedies: Mapping[str, str]) -> str | None:
    """Return the remedy of the first text in `remedies` that is in `errors`; None if there is none."""
    return next((remedy for words, remedy in remedies.items() if words.lower() in errors.lower()), None)


def last_line(errors: str) -> str:
    """Return the last line of a command's output that is not blank."""
    return next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")


def quoted_path(python: str) -> str:
    """Return an interpreter's path quoted for a shell. A leading ~/ stays unquoted, so that the host's shell expands
    it.
    """
    return f"~/{shlex.quote(python[2:])}" if python.startswith("~/") else shlex.quote(python)


def end(process: "subprocess.Popen[str]") -> None:
    """End a link's process: terminate it, so that it can end the command on the host, and kill it after 3 s."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=_TERM_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def script(program: str, request: dict[str, Any]) -> str:
    """Return the Python text for the host's standard input: a program and the call with its request."""
    function = program.rpartition(".")[2]
    return _program(program) + _RUN.format(function=function, request=json.dumps(request), mark=_REPLY_MARK)


def _program(program: str) -> str:
    file, _, function = program.partition(".")
    if file == "check":
        return (Path(__file__).parent / "remote_scripts" / "check.py").read_text(encoding="utf-8")
    return f"from rlctl.cluster.remote_scripts.{file} import {function}"


class HostCalls:
    """Calls (host, program, request) that run at the same time, each in a thread.

    Leaving the block terminates calls that still run. With `finish` it waits until they have ended.
    """

    def __init__(
        self, calls: Iterable[tuple[Host, str, dict[str, Any]]], deadline_s: float, finish: bool = False
    ) -> None:
        calls = list(calls)
        self._finish = finish
        self._running: set[subprocess.Popen[str]] = set()
        self._threads = ThreadPoolExecutor(max(1, min(64, len(calls))))
        self._futures = {
            self._threads.submit(host.run, program, request, deadline_s, self._running): index
            for index, (host, program, request) in enumerate(calls)
        }

    def __enter__(self) -> "HostCalls":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=self._finish, cancel_futures=True)
        if not self._finish:
            for process in list(self._running):
                process.terminate()

    def answers(self) -> "Iterator[tuple[int, dict[str, Any] | HostError]]":
        """Yield (index of the call, reply or error) in completion order."""
        for future in as_completed(self._futures):
            error = future.exception()
            if error is not None and not isinstance(error, HostError):
                raise error
            yield self._futures[future], error if error is not None else future.result()
