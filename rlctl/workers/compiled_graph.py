"""Calls to a group of workers through a Ray Compiled Graph. Only this module uses `ray.dag`.

Every rank reads the same message from shared memory, takes its arguments, and answers through a separate channel. So
one call costs the driver one write for any number of ranks. Ray does not develop compiled graphs further (ray PR
61747), so rlctl can do without: if `Graph` raises `GraphUnavailable`, ordinary calls are used.
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

# First allowed release of Ray, and first release that is no longer allowed.
TESTED = ((2, 60), (2, 61))
# Deadline of the first call, which proves that the graph works: compiling succeeds even if an actor never reads.
_PROOF_S = 120.0
_SUBMIT_S = 60
# A value whose arrays have at most this many bytes travels as plain bytes. A call to two workers then takes 0.49 ms
# instead of 0.71 with 1 KB and 0.56 instead of 0.62 with 256 KB, but 2.9 instead of 0.9 with 1 MB.
_SMALL_BYTES = 256 << 10
# Readers poll without sleeping for this long, then sleep between two polls.
_SPIN_S = 1e-3
# A sleep lasts this share of the time waited, within these limits. So a reader is late by at most this share.
_SLEEP_SHARE = 0.02
_SHORTEST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 5e-3

# (name of the method, arguments of every rank, keyword arguments)
Message = tuple[str, Sequence[tuple[Any, ...]], dict[str, Any]]
Answer = tuple[Failure | None, Any]


class GraphUnavailable(RuntimeError):
    """No graph can be made. The text says why. Ordinary calls give the same results."""


class GraphBroken(RuntimeError):
    """The state of the graph is unknown, for example after a call that was given up."""


class Graph:
    """One compiled graph over all actors. Only one thread may use it."""

    def __init__(self, actors: Sequence[Any], buffer_bytes: int) -> None:
        """Compile the graph and make a first call. Raises GraphUnavailable.

        actors: handles of `WorkerActor`. buffer_bytes: initial size of a channel, which grows by itself.
        """
        self._graph: Any = None
        self._broken = False
        # Number of calls through the graph.
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
        """Call every rank; return the answers in the order of ranks.

        Raises TypeError for an argument that cannot be sent. Raises TimeoutError, RayActorError (a rank is gone) or
        another error of Ray; after these the graph can no longer be used.
        """
        if self._broken:
            raise GraphBroken("an earlier call through the graph was given up")
        # Broken until all ranks have answered: after an error the channels may still have messages of this call.
        self._broken = True
        try:
            answers = ray.get(self._graph.execute(pack_value(message)), timeout=deadline_s)
        except RayChannelTimeoutError as error:
            raise TimeoutError from error
        except TypeError:
            # An argument could not be pickled, so nothing was sent.
            self._broken = False
            raise
        self._broken = False
        self.calls += 1
        return [unpack_value(answer) for answer in answers]

    def submit(self, message: Message) -> Callable[[], object]:
        """Start a call; return a function that waits for the answers. It must be called before the next `submit`.

        Only measurements use this method.
        """
        answers = self._graph.execute(pack_value(message))
        self.calls += 1
        return lambda: ray.get(answers, timeout=_PROOF_S)

    def close(self) -> None:
        """End the graph: at once if its actors were killed before, otherwise after the current call."""
        graph = self._graph
        self._graph = None
        self._broken = True
        if graph is not None:
            with contextlib.suppress(RayActorError, RayChannelError):
                graph.teardown()


def idle(worker: object) -> None:
    """Do nothing: a call of this method proves that a worker answers."""


def pack_value(value: Any) -> Any:
    """Return a value in the form in which it travels through a graph's channel.

    A small value becomes bytes, which Ray passes on unchanged. A large value is returned unchanged, so that its arrays
    are written only once.
    """
    arrays: list[pickle.PickleBuffer] = []
    try:
        pickled = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    except Exception:
        # Ray can pickle more values than `pickle`, and explains why a value cannot be sent.
        return value
    # Only Ray can unpickle classes that the driver's own script defines.
    if b"__main__" in pickled or sum(array.raw().nbytes for array in arrays) > _SMALL_BYTES:
        return value
    return pickle.dumps((pickled, [bytes(array) for array in arrays]))


def unpack_value(value: Any) -> Any:
    """Return the value given to `pack_value`, in new memory. Arrays are read-only, as in ordinary calls."""
    if not isinstance(value, bytes):
        return copy_out(value)
    pickled, arrays = pickle.loads(value)
    return pickle.loads(pickled, buffers=arrays)


def take_arguments(message: Any, rank: int) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return one rank's method, arguments and keyword arguments from a packed `Message`."""
    if isinstance(message, bytes):
        method, per_rank, kwargs = unpack_value(message)
        return method, per_rank[rank], kwargs
    method, per_rank, kwargs = message
    return method, copy_out(per_rank[rank]), copy_out(kwargs)


def copy_out(value: Any) -> Any:
    """Return a copy of a value that has no views of the channel's memory, because such a view blocks the channel.

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
    """Make this process's channel readers sleep between polls. Returns False if Ray's reader has another signature.

    Ray's readers poll without sleeping, so an idle worker uses a whole core (ray PR 55547, not merged). With this
    reader it uses 0.03 of a core. A step of two workers on two cores takes 1.04 times as long as with ordinary calls,
    and 1.08 times with Ray's readers.
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
        # Ray interrupts and repeats a read ten times a second, so the channel object keeps the time of the first read.
        if not hasattr(self, "waiting_since"):
            self.waiting_since = now
            look_s = _SPIN_S
        while True:
            try:
                value = read(self, look_s)
            except RayChannelTimeoutError:
                # After the first look, each look returns at once, and the sleep below is the wait.
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
    """Return Ray's graph in which one message goes to every actor, and each actor's answer comes back."""
    from ray.dag import InputNode, MultiOutputNode

    read_patiently()
    logging.getLogger("ray.dag.compiled_dag_node").addFilter(_is_news)
    with InputNode() as message:
        leaves = [actor.graph_call.bind(message, rank) for rank, actor in enumerate(actors)]
        return MultiOutputNode(leaves).experimental_compile(
            _submit_timeout=_SUBMIT_S, _buffer_size_bytes=buffer_bytes, _max_inflight_executions=1
        )


def _is_news(record: logging.LogRecord) -> bool:
    """Return True unless a log record is a traceback about the end of a graph.

    Ray's thread tears a graph down as soon as an actor is gone, and logs a traceback for each actor. rlctl needs none:
    `WorkerDied` names the dead worker, and a requested end is no error.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], RayActorError | RayChannelError))
