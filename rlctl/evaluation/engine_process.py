"""An engine in another process, without Ray, for checks that need only a few calls of one engine."""

import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlctl.generation.engine import Engine
from rlctl.generation.spec import EngineSpec, build_engine

P = ParamSpec("P")
R = TypeVar("R")
# Most seconds of one call. The longest is the start of vLLM on a busy machine.
DEADLINE_S = 600.0


class EngineProcessError(RuntimeError):
    """A call that failed: the engine raised an error, its process ended, or it gave no answer in time."""


class EngineProcess:
    """Process that hosts one engine. As a context manager it ends the process after the block."""

    def __init__(
        self, spec: EngineSpec, environment: Mapping[str, str], log: Path, imports: Sequence[str] = ()
    ) -> None:
        """Start the engine, and wait until it is ready. environment: variables for its process. log: file for output.

        imports: modules that are imported once for all engine processes of this process. Raises EngineProcessError.
        """
        context = get_context("forkserver")
        context.set_forkserver_preload(list(imports))
        self._connection, engine_connection = context.Pipe()
        self._log = log
        arguments = (engine_connection, spec, dict(environment), str(log))
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        variables = dict(os.environ)
        # The first process starts multiprocessing's fork server, whose imports read the environment variables.
        os.environ.update(environment)
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(variables)
        engine_connection.close()
        self._wait_for_answer("start")

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()

    def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method of the engine and return its result. Raises EngineProcessError with the engine's reason."""
        # `kwargs` is here for the type of `method` only.
        assert not kwargs
        self._connection.send((method.__name__, args))
        answer: R = self._wait_for_answer(method.__name__)
        return answer

    def _wait_for_answer(self, call: str) -> Any:
        if not self._connection.poll(DEADLINE_S):
            raise EngineProcessError(f"the engine gave no answer to {call} for {DEADLINE_S:g} s; its log: {self._log}")
        try:
            succeeded, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            raise EngineProcessError(f"the engine's process ended in {call}; its log: {self._log}") from None
        if not succeeded:
            raise EngineProcessError(answer)
        return answer


def _serve(connection: Connection, spec: EngineSpec, environment: dict[str, str], log: str) -> None:
    """Build the engine, and answer calls until the other end closes the connection."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    engine: Engine | None = None
    while True:
        try:
            if engine is None:
                engine = build_engine(spec)
                answer = None
            else:
                method, args = connection.recv()
                answer = getattr(engine, method)(*args)
            message = (True, answer)
        except EOFError:
            break
        except BaseException as error:
            message = (False, _describe_error(error))
        connection.send(message)
        if engine is None:
            # The engine could not be built.
            break
    # A normal exit would wait for vLLM's threads.
    os._exit(0)


def _describe_error(error: BaseException) -> str:
    """Return an error's type and reason as one line.

    A validation error's first line has the number of errors and the class, so its second line is taken.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[min(1, len(lines) - 1)] if lines and lines[0].endswith("Config") else "".join(lines[:1])
    return f"{type(error).__name__}: {reason.partition(' [type=')[0]}" if reason else type(error).__name__
