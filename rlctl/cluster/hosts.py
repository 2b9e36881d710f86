"""Runs a program of `remote_scripts/` on a machine, this one or another, and brings back its answer.

The program's source and its request go through the standard input of a Python there: nothing need be installed for
it, and what is secret in a request (the token) stands on no command line and in no file of ours.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROGRAMS = Path(__file__).parent / "remote_scripts"
_SHARED = re.compile(r"^from rlctl\.cluster\.remote_scripts\.(\w+) import .*$", re.MULTILINE)
_MARK = "@rlctl "
# From being asked to end until it is made to.
_ENDS_S = 3.0
_RUN = """
try:
    reply = run(json.loads({request!r}))
except Exception as error:
    reply = {{"error": "%s: %s" % (type(error).__name__, error)}}
print({mark!r} + json.dumps(reply), flush=True)
"""


class HostError(Exception):
    """A host could not be asked, or its program failed. The message is one line without the host's name."""


@dataclass(frozen=True)
class Link:
    """How another machine is reached. command: what stands before a command there.

    shell: a shell there reads the command, as one text. says: (words in the link's own complaints, what a person does
    about it). fails: the exit code that only a link that failed ends with; None: it has none of its own. hides: the
    beginning of the names of variables that would lead the link astray, and those names that it needs all the same.
    """

    command: tuple[str, ...]
    shell: bool
    says: tuple[tuple[str, str], ...]
    fails: int | None = None
    hides: tuple[str, tuple[str, ...]] | None = None

    def environment(self) -> dict[str, str] | None:
        """Of the link's process; None: ours."""
        return None if self.hides is None else visible(*self.hides)


@dataclass(frozen=True)
class Host:
    """A machine. link: None for this one. setup: lines of shell that are run there before its Python."""

    name: str
    python: str = sys.executable
    link: Link | None = None
    setup: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """A Python there that reads its program from the standard input."""
        if self.link is None:
            return [self.python, "-"]
        text = f"{shown(self.python)} -"
        if self.setup:
            text = "\n".join(["{", *self.setup, "} </dev/null >&2", f"exec {text}"])
        if self.link.shell:
            return [*self.link.command, text]
        return [*self.link.command, "bash", "-c", text]

    def run(
        self,
        program: str,
        request: dict[str, Any],
        deadline_s: float,
        running: "set[subprocess.Popen[str]] | None" = None,
    ) -> dict[str, Any]:
        """Return the answer of run(request) in remote_scripts/PROGRAM.py. Raises HostError.

        running: holds the process meanwhile.
        """
        process = self._started()
        held = running if running is not None else set()
        held.add(process)
        try:
            output, errors = process.communicate(script(program, request), timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise HostError(f"no answer within {deadline_s:g} s") from None
        finally:
            end(process)
            held.discard(process)
        answers = [line for line in output.splitlines() if line.startswith(_MARK)]
        if not answers:
            raise HostError(self._why(errors, process.returncode))
        reply: dict[str, Any] = json.loads(answers[-1].removeprefix(_MARK))
        if "error" in reply:
            raise HostError(reply["error"])
        return reply

    def follow(self, program: str, request: dict[str, Any], stdout: int | None = None) -> "subprocess.Popen[str]":
        """The program with its output on ours, or a pipe, line by line, until it or this process ends."""
        process = subprocess.Popen(
            self.command(),
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=None if stdout is None else subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            env=self._environment(),
        )
        assert process.stdin
        process.stdin.write(script(program, request, answer=False))
        process.stdin.close()
        return process

    def _environment(self) -> dict[str, str] | None:
        return self.link.environment() if self.link else None

    def _started(self) -> "subprocess.Popen[str]":
        try:
            # In a session of its own: Ctrl-C is this process's to handle, so that no host is left half-way.
            return started(self.command(), self._environment())
        except FileNotFoundError as error:
            raise HostError(f"{error.filename} is not installed on this machine") from None

    def _why(self, errors: str, code: int) -> str:
        if self.link is not None and code == (code if self.link.fails is None else self.link.fails):
            for words, meaning in self.link.says:
                if words in errors:
                    return meaning
        if "SyntaxError" in errors:
            return f"wrong Python: {self.python} is too old to run a check; set python=..., 3.11 or newer"
        if code == 127 or "No such file" in errors:
            return f"no Python there: {self.python} not found; set python=... to one that has ray and rlctl"
        said = [line.strip() for line in errors.splitlines() if line.strip()]
        return said[-1] if said else f"ended with exit code {code} and said nothing"


def answer(
    command: Sequence[str], deadline_s: float, stdin: str = "", environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """What it printed, and its exit code. Raises TimeoutExpired, FileNotFoundError.

    In a session of its own: Ctrl-C is this process's to handle.
    """
    process = started(command, environment)
    try:
        out, err = process.communicate(stdin, timeout=deadline_s)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def started(command: Sequence[str], environment: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """The command with pipes to its three streams, in a session of its own. Raises FileNotFoundError."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        errors="replace",
        env=environment,
    )


def visible(hidden: str, kept: tuple[str, ...]) -> dict[str, str]:
    """This process's environment without the variables whose names begin so, but for those that are kept."""
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(hidden)}


def shown(python: str) -> str:
    """An interpreter's path as a shell takes it, which fills in the home there."""
    return f"~/{shlex.quote(python[2:])}" if python.startswith("~/") else shlex.quote(python)


def end(process: "subprocess.Popen[str]") -> None:
    """Ends a link, and with it what runs behind it: asked first, so that it can tell the other side."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=_ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def script(program: str, request: dict[str, Any], answer: bool = True) -> str:
    """The program and its request as they go through the standard input."""
    source = whole(program)
    if not answer:
        return f"{source}\nrun(json.loads({json.dumps(request)!r}))\n"
    return source + _RUN.format(request=json.dumps(request), mark=_MARK)


def whole(program: str) -> str:
    """A program that needs none of its neighbours: what it imports of its folder stands in it."""
    return _SHARED.sub(lambda found: _source(found[1]), _source(program))


def _source(program: str) -> str:
    return (_PROGRAMS / f"{program}.py").read_text(encoding="utf-8")


class HostCalls:
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
            process.terminate()
