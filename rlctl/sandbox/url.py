"""Sandbox of a server with the HTTP API of SandboxFusion: `POST /run_code`.

Programs run on the server's machine, whose isolation rlctl cannot measure.
"""

import base64
import json
import shlex
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from rlctl.sandbox.base import GUARANTEES, LANGUAGES, Ending, Guarantee, Limits, Program, Result, SandboxError, Strength
from rlctl.sandbox.base import split_path as check_path

# Seconds that an answer may take besides the program's wall time: a queue, a slow start of a container.
_SPARE_S = 60.0
_MOST_ANSWER_BYTES = 256 << 20


class UrlSandbox:
    """Sends each program to a server."""

    name = "url"

    def __init__(self, url: str) -> None:
        self._url = f"{url.rstrip('/')}/run_code"

    @property
    def isolation(self) -> Mapping[Guarantee, Strength]:
        """Strength of each guarantee: the server's own."""
        return dict.fromkeys(GUARANTEES, "elsewhere")

    def run(self, program: Program, limits: Limits) -> Result:
        """Run a program on the server. Raises ValueError for a kept folder, which the server does not have."""
        if program.folder is not None:
            raise ValueError("a server keeps no working folder between programs")
        start = time.monotonic()
        answer = self._ask(_make_request(program, limits), limits.wall_s + _SPARE_S)
        if answer.get("status") == "SandboxError":
            raise SandboxError(f"{self._url}: {answer.get('message') or 'SandboxError'}")
        run = answer.get("run_result") or {}
        status = run.get("status")
        if status not in ("Finished", "TimeLimitExceeded"):
            raise SandboxError(f"{self._url}: {answer.get('message') or status or 'no run_result'}")
        return _read_run(run, answer.get("files") or {}, program, limits, time.monotonic() - start)

    def close(self) -> None:
        """Do nothing: each request has its own connection."""

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the server's answer to a request. Raises SandboxError if there is none."""
        body = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        try:
            message = urllib.request.Request(self._url, body, headers)
            with urllib.request.urlopen(message, timeout=timeout_s) as response:
                answer = json.loads(response.read(_MOST_ANSWER_BYTES))
        except (OSError, ValueError) as error:
            raise SandboxError(f"{self._url}: {error}") from error
        if not isinstance(answer, dict):
            raise SandboxError(f"{self._url}: the answer is no object")
        return answer


def _make_request(program: Program, limits: Limits) -> dict[str, Any]:
    """Return the body of a request."""
    language = program.language
    code = program.source
    if code is None:
        language = "bash"
        argv = ("python3", *program.argv[1:]) if program.argv[:1] == ("python",) else program.argv
        code = shlex.join(argv)
    elif language not in LANGUAGES:
        raise ValueError(f"language {language!r} is none of {', '.join(LANGUAGES)}")
    elif language == "sh":
        language = "bash"
    assignments = "".join(f"export {name}={shlex.quote(text)}\n" for name, text in program.variables.items())
    if language == "bash":
        code = assignments + code
    elif program.variables:
        raise ValueError("a server takes variables for commands alone")
    for name in (*program.files, *program.outputs):
        check_path(name)
    return {
        "code": code,
        "language": language,
        "run_timeout": limits.wall_s,
        "compile_timeout": limits.wall_s,
        "memory_limit_MB": limits.memory_mib,
        "stdin": program.stdin.decode("utf-8", "surrogateescape"),
        "files": {name: base64.b64encode(content).decode() for name, content in program.files.items()},
        "fetch_files": list(program.outputs),
    }


def _read_run(
    run: Mapping[str, Any], files: Mapping[str, str], program: Program, limits: Limits, wall_s: float
) -> Result:
    """Return the outcome in a server's answer."""
    stdout = str(run.get("stdout") or "").encode("utf-8", "surrogateescape")
    stderr = str(run.get("stderr") or "").encode("utf-8", "surrogateescape")
    is_cut = len(stdout) + len(stderr) > limits.output_bytes
    code = run.get("return_code")
    ending = Ending.EXITED
    if run["status"] == "TimeLimitExceeded":
        ending = Ending.WALL_TIME
    elif is_cut:
        ending = Ending.OUTPUT
    elif not isinstance(code, int):
        raise SandboxError("the server's answer has no return_code")
    elif code < 0 or 128 < code <= 128 + 64:
        ending = Ending.SIGNAL
    exit_code = 128 - code if isinstance(code, int) and code < 0 else code
    contents = {name: base64.b64decode(files[name]) for name in program.outputs if name in files}
    return Result(
        ending=ending,
        exit_code=exit_code if ending in (Ending.EXITED, Ending.SIGNAL) else None,
        stdout=stdout[: limits.output_bytes],
        stderr=stderr[: max(0, limits.output_bytes - len(stdout))],
        is_cut=is_cut,
        files=contents,
        missing={name: "not returned by the server" for name in program.outputs if name not in files},
        wall_s=wall_s,
        cpu_s=float(run.get("execution_time") or 0.0),
    )
