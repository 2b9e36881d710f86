"""Calls to a group of workers through a Ray Compiled Graph: the only place that knows Ray's `dag`.

Every rank reads the same message from shared memory, takes its arguments and answers through its own channel. So one
call costs the driver one write for any number of ranks. Upstream keeps compiled graphs in maintenance (ray PR 61747):
nothing depends on them, and `GraphUnavailable` says why there is none.
"""

import contextlib
import inspect
import logging
import math
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayChannelError, RayChannelTimeoutError

from rlctl.workers.errors import Failure

# The first tested release of Ray, and the first that is not allowed.
TESTED = ((2, 60), (2, 61))
# The first execution proves the graph: an actor that never reads compiles all the same.
_PROOF_S = 120.0
_SUBMIT_S = 60
# A value with at most this much of arrays travels as plain bytes: a call to two workers takes 0.49 instead of 0.71 ms
# with 1 KB, 0.56 instead of 0.62 with 256 KB, but 2.9 instead of 0.9 with 1 MB.
_SMALL_BYTES = 256 << 10
# Readers spin this long, then sleep between looks.
_SPIN_S = 1e-3
# A sleep lasts this share of the time waited, within these limits: a reader is late by this share at most.
_SLEEP_SHARE = 0.02
_SHORTEST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 5e-3

# (name of the method, arguments of every rank, keyword arguments)
Message = tuple[str, Sequence[tuple[Any, ...]], dict[str, Any]]
Answer = tuple[Failure | None, Any]


class GraphUnavailable(RuntimeError):
    """No graph can be made; ordinary calls do the same."""


class GraphBroken(RuntimeError):
    """The graph's position is not known any more, for example after a call that was given up."""


class Graph:
    """One live graph over all actors, for use by one thread."""

    def __init__(self, actors: Sequence[Any], buffer_bytes: int) -> None:
        """Compile and try the graph. Raises GraphUnavailable.

        actors: handles of `WorkerActor`. buffer_bytes: size of a channel, which grows by itself.
        """
        self._graph: Any = None
        self._broken = False
        # Calls that went through the graph.
        self.calls = 0
        version = tuple(int(part) for part in ray.__version__.split(".")[:2])
        if not TESTED[0] <= version < TESTED[1]:
            raise GraphUnavailable(f"Ray {ray.__version__} is none of the releases that this was tested with")
        try:
            self._graph = _compile_graph(actors, buffer_bytes)
            answers = self.call((idle.__name__, [()] * len(actors), {}), _PROOF_S)
        except Exception as error:
            self.close()
            text = str(error).strip().splitlines()
            raise GraphUnavailable(f"{type(error).__name__}: {text[0] if text else ''}") from error
        if failures := [failure for failure, _ in answers if failure]:
            self.close()
            raise GraphUnavailable(f"{failures[0].worker}: {failures[0].type}: {failures[0].text}")

    def call(self, message: Message, deadline_s: float) -> list[Answer]:
        """Call every rank; return the answers. Raises TimeoutError, RayActorError (a rank is gone), or an error of Ray.

        Each error breaks the graph, except TypeError: an argument that cannot be sent.
        """
        if self._broken:
            raise GraphBroken("an earlier call through the graph was given up")
        self._broken = True
        try:
            answers = ray.get(self._graph.execute(pack_value(message)), timeout=deadline_s)
        except RayChannelTimeoutError as error:
            raise TimeoutError from error
        except TypeError:
            self._broken = False
            raise
        self._broken = False
        self.calls += 1
        return [unpack_value(answer) for answer in answers]

    def submit(self, message: Message) -> Callable[[], object]:
        """Start a call; the returned function waits for the answer; call it before the next. For measuring."""
        answers = self._graph.execute(pack_value(message))
        self.calls += 1
        return lambda: ray.get(answers, timeout=_PROOF_S)

    def close(self) -> None:
        """End the graph; at once if its actors were killed before, else after the current call."""
        graph = self._graph
        self._graph = None
        self._broken = True
        if graph is not None:
            with contextlib.suppress(RayActorError, RayChannelError):
                graph.teardown()


def idle(worker: object) -> None:
    """Do nothing: the method of a call that only proves its worker answers."""


def pack_value(value: Any) -> Any:
    """Return a value in the form in which it travels.

    A small value becomes bytes, which Ray hands through as they are. A large one stays as it is, so that its arrays
    are written once.
    """
    arrays: list[pickle.PickleBuffer] = []
    try:
        pickled = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    except Exception:
        # Ray can pickle more values, and says why a value cannot be sent.
        return value
    # Classes that the driver's own script defines are found by Ray alone.
    if b"__main__" in pickled or sum(array.raw().nbytes for array in arrays) > _SMALL_BYTES:
        return value
    return pickle.dumps((pickled, [bytes(array) for array in arrays]))


def unpack_value(value: Any) -> Any:
    """Return the value given to `pack_value`, copied into new memory; arrays are read-only, as in ordinary calls."""
    if not isinstance(value, bytes):
        return copy_out(value)
    pickled, arrays = pickle.loads(value)
    return pickle.loads(pickled, buffers=arrays)


def take_arguments(message: Any, rank: int) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return the method, arguments and keyword arguments of one rank, out of a packed Message."""
    if isinstance(message, bytes):
        method, per_rank, kwargs = unpack_value(message)
        return method, per_rank[rank], kwargs
    method, per_rank, kwargs = message
    return method, copy_out(per_rank[rank]), copy_out(kwargs)


def copy_out(value: Any) -> Any:
    """Return an equal value without views of a channel's memory, which block the channel if they are kept.

    Arrays stay read-only, as in ordinary calls.
    """
    if isinstance(value, np.ndarray):
        copy = value.copy()
        copy.flags.writeable = False
        return copy
    if isinstance(value, dict):
        return {key: copy_out(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(copy_out(inner) for inner in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: copy_out(getattr(value, field.name)) for field in fields(value)})
    return value


def read_patiently() -> bool:
    """Make this process's channel readers sleep between looks. Returns False if Ray's reader is not the known one.

    Ray's readers spin: an idle worker uses a whole core (ray PR 55547, not merged). With this reader it uses 0.03 of a
    core. A step of two workers on two cores takes 1.04 instead of 1.08 times as long as with ordinary calls.
    """
    from ray.exceptions import RayChannelTimeoutError
    from ray.experimental.channel.shared_memory_channel import Channel

    read = Channel.read
    if getattr(read, "is_patient", False):
        return True
    if list(inspect.signature(read).parameters) != ["self", "timeout"]:
        return False

    def read_with_sleeps(self: Any, timeout: float | None = None) -> Any:
        now = time.monotonic()
        end = math.inf if timeout is None or timeout < 0 else now + timeout
        look_s = 0.0
        # Ray interrupts the read ten times a second; the wait continues.
        if not hasattr(self, "waiting_since"):
            self.waiting_since = now
            look_s = _SPIN_S
        while True:
            try:
                value = read(self, look_s)
            except RayChannelTimeoutError:
                look_s = 0.0
                now = time.monotonic()
                if now >= end:
                    raise
                sleep_s = (now - self.waiting_since) * _SLEEP_SHARE
                time.sleep(min(_LONGEST_SLEEP_S, max(_SHORTEST_SLEEP_S, sleep_s)))
            else:
                del self.waiting_since
                return value

    read_with_sleeps.is_patient = True  # type: ignore[attr-defined]
    Channel.read = read_with_sleeps
    return True


def _compile_graph(actors: Sequence[Any], buffer_bytes: int) -> Any:
    from ray.dag import InputNode, MultiOutputNode

    read_patiently()
    logging.getLogger("ray.dag.compiled_dag_node").addFilter(_is_news)
    with InputNode() as message:
        leaves = [actor.graph_call.bind(message, rank) for rank, actor in enumerate(actors)]
        return MultiOutputNode(leaves).experimental_compile(
            _submit_timeout=_SUBMIT_S, _buffer_size_bytes=buffer_bytes, _max_inflight_executions=1
        )


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for a traceback of a graph's end.

    Ray's own thread tears a graph down as soon as an actor is gone, with a traceback for each. `WorkerDied` names the
    dead worker, and a requested end is no error.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], RayActorError | RayChannelError))
