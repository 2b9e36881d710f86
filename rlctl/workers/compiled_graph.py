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

# Releases of Ray from the first tested, up to the first not allowed.
TESTED = ((2, 60), (2, 61))
# The first execution proves the graph: an actor that never reads compiles all the same.
_PROOF_S = 120.0
_SUBMIT_S = 60
# A value with at most this much of arrays travels as plain bytes: a call to two workers takes 0.49 instead of 0.71 ms
# with 1 KB, 0.56 instead of 0.62 with 256 KB, but 2.9 instead of 0.9 with 1 MB.
_SMALL_BYTES = 256 << 10
# Readers spin this long, then sleep between looks for a share of the time waited, which bounds how late they are.
_SPIN_S, _SHORTEST_S, _LONGEST_S, _LATE = 1e-3, 20e-6, 5e-3, 0.02

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
            self._graph = _compiled(actors, buffer_bytes)
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
            answers = ray.get(self._graph.execute(packed(message)), timeout=deadline_s)
        except RayChannelTimeoutError as error:
            raise TimeoutError from error
        except TypeError:
            self._broken = False
            raise
        self._broken = False
        self.calls += 1
        return [unpacked(answer) for answer in answers]

    def submit(self, message: Message) -> Callable[[], object]:
        """Start a call; the returned function waits for the answer; call it before the next. For measuring."""
        answers = self._graph.execute(packed(message))
        self.calls += 1
        return lambda: ray.get(answers, timeout=_PROOF_S)

    def close(self) -> None:
        """End the graph; at once if its actors were killed before, else after the current call."""
        graph, self._graph, self._broken = self._graph, None, True
        if graph is not None:
            with contextlib.suppress(RayActorError, RayChannelError):
                graph.teardown()


def idle(worker: object) -> None:
    """Do nothing: the method of a call that only proves its worker answers."""


def packed(value: Any) -> Any:
    """Return the form in which a value travels.

    A small value becomes bytes, which Ray hands through as they are. A large one stays as it is, so that its arrays
    are written once.
    """
    arrays: list[pickle.PickleBuffer] = []
    try:
        data = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    except Exception:
        # Ray can pickle more, and says why something cannot be sent.
        return value
    # Classes that the driver's own script defines are found by Ray alone.
    if b"__main__" in data or sum(array.raw().nbytes for array in arrays) > _SMALL_BYTES:
        return value
    return pickle.dumps((data, [bytes(array) for array in arrays]))


def unpacked(value: Any) -> Any:
    """Return the value given to `packed`, copied into new memory; arrays are read-only, as in ordinary calls."""
    if not isinstance(value, bytes):
        return own(value)
    data, arrays = pickle.loads(value)
    return pickle.loads(data, buffers=arrays)


def take(message: Any, rank: int) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return a rank's own part of a packed Message."""
    if isinstance(message, bytes):
        method, per_rank, kwargs = unpacked(message)
        return method, per_rank[rank], kwargs
    method, per_rank, kwargs = message
    return method, own(per_rank[rank]), own(kwargs)


def own(value: Any) -> Any:
    """Return an equal value without views of a channel's memory, which block the channel if they are kept.

    Arrays stay read-only, as in ordinary calls.
    """
    if isinstance(value, np.ndarray):
        copy = value.copy()
        copy.flags.writeable = False
        return copy
    if isinstance(value, dict):
        return {key: own(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(own(each) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: own(getattr(value, field.name)) for field in fields(value)})
    return value


def read_patiently() -> bool:
    """Make this process's channel readers sleep between looks. Returns False if Ray's reader is not the known one.

    Ray's readers spin: an idle worker uses a whole core (ray PR 55547, not merged). With this reader it uses 0.03 of a
    core. A step of two workers on two cores takes 1.04 instead of 1.08 times as long as with ordinary calls.
    """
    from ray.exceptions import RayChannelTimeoutError
    from ray.experimental.channel.shared_memory_channel import Channel

    read = Channel.read
    if getattr(read, "patient", False):
        return True
    if list(inspect.signature(read).parameters) != ["self", "timeout"]:
        return False

    def patient(self: Any, timeout: float | None = None) -> Any:
        now = time.monotonic()
        end = math.inf if timeout is None or timeout < 0 else now + timeout
        # Ray interrupts the read ten times a second; the wait continues.
        began, look = getattr(self, "waiting_since", now), 0.0 if hasattr(self, "waiting_since") else _SPIN_S
        self.waiting_since = began
        while True:
            try:
                value = read(self, look)
            except RayChannelTimeoutError:
                look, now = 0.0, time.monotonic()
                if now >= end:
                    raise
                time.sleep(min(_LONGEST_S, max(_SHORTEST_S, (now - began) * _LATE)))
            else:
                del self.waiting_since
                return value

    patient.patient = True  # type: ignore[attr-defined]
    Channel.read = patient
    return True


def _compiled(actors: Sequence[Any], buffer_bytes: int) -> Any:
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
