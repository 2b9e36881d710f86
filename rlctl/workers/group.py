"""The driver's side of worker processes: `Worker` (one) and `WorkerGroup` (ranks called in lockstep).

Every wait has a deadline and names the worker and the call (no silent wait). Errors are `WorkerError`, `WorkerDied` or
`WorkerTimeout`. A caller can start a call and wait for its answers later (`Pending`), so that trainer and generator
work at the same time.

A call names its method as an unbound function, for example `group.call(TrainerWorker.info)`, so that a type checker
knows the arguments and results. Only the function's name is sent, so it may be a method of a Protocol too.
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, TypeVarTuple, cast

import ray
from ray.exceptions import RayActorError, RayError

from rlctl.utils.event_loop import done
from rlctl.utils.ports import LOOPBACK
from rlctl.workers.actor import WorkerActor
from rlctl.workers.compiled_graph import Answer, Graph, GraphBroken, Message
from rlctl.workers.errors import Failure, WorkerDied, WorkerError, WorkerTimeout
from rlctl.workers.nodes import NodeLease
from rlctl.workers.shared_arguments import put_common
from rlctl.workers.waits import Waits

P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")
DEADLINE_KNOB = "run.deadline_s"
_ASK_S = 60.0
# The driver waits for ended calls again and again: first for 0.01 s, then each time twice as long, at most 0.2 s.
_FIRST_LOOK_S = 0.01
_CALLS_LOOK_S = 0.2
# Seconds that one call for an outcome waits in the worker (`WorkerGroup.outcomes`).
_OUTCOME_WAIT_S = 2.0
# After one rank has failed, a call waits this long for the answers of the other ranks.
_OTHERS_S = 10.0


@dataclass(frozen=True)
class WorkerSpec:
    """Specification of a worker process."""

    name: str
    # Builds the worker, in its process. Must be picklable.
    make: Callable[[], Any]
    # Environment variables, set before `make` runs.
    env: dict[str, str] = field(default_factory=dict)
    log: str | None = None
    threads: int = 1
    # Node of the process; None if the run has only this machine.
    node: NodeLease | None = None
    # Explains calls that take long; None: long calls are not explained.
    waits: Waits | None = None


class Worker:
    """One worker process. Wait for `built` before the first call."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        # Two more concurrent calls than the worker has threads, so that `pid` and `ask` answer while these are busy.
        actor = ray.remote(num_cpus=0, max_concurrency=spec.threads + 2, max_restarts=0)(WorkerActor)
        if spec.node:
            actor = actor.options(scheduling_strategy=spec.node.strategy)
        self.handle = actor.remote(spec.name, spec.make, spec.env, spec.log, spec.threads)
        self._built = self.handle.build.remote()
        self._pid: int | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    def built(self) -> "Pending[None]":
        """Return the pending construction of the worker."""
        return Pending("start-up", [self], [self._built])

    def start(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> "Pending[R]":
        """Start one call. `wait(...)[0]` of the returned `Pending` is its result."""
        name = method.__name__
        return Pending(name, [self], [self.handle.call.remote(name, args, kwargs)])

    async def call(
        self, deadline_s: float, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Make one call on an event loop and await its result. Raises the errors of `Pending.wait`.

        If the caller is cancelled, the worker still finishes the method. All calls must have ended before Ray shuts
        down.
        """
        name = method.__name__
        ref = self.handle.call.remote(name, args, kwargs)
        future = ref.future()
        pending = Pending[R](name, [self], [ref])
        with _explain_long_wait([self], name, pending.late_workers, deadline_s, DEADLINE_KNOB):
            try:
                async with asyncio.timeout(deadline_s):
                    await done(future)
            except TimeoutError:
                raise WorkerTimeout(name, [self.name], deadline_s, DEADLINE_KNOB) from None
        try:
            (result,) = _results(name, [future.result()])
        except RayActorError as error:
            # On a thread, because it may wait 8 s until Ray has noticed the loss of a node.
            reason = await asyncio.to_thread(_explain_death, error, [self])
            raise WorkerDied(name, [self.name], reason) from error
        return cast(R, result)

    @property
    def lost_its_node(self) -> bool:
        """True if the worker's node is gone, so that no process can be started there."""
        return self.spec.node is not None and not self.spec.node.lives()

    def meeting_point(self) -> tuple[str, int]:
        """Return (address, free port) of the worker's node, for processes of all nodes to connect to the worker."""
        address = self.spec.node.address if self.spec.node else LOOPBACK
        pending_port = Pending[int]("free_port", [self], [self.handle.free_port.remote(address)])
        return address, pending_port.wait(_ASK_S)[0]

    def pid(self) -> int:
        """Return the worker's process id, also while a method runs."""
        self._pid = Pending[int]("pid", [self], [self.handle.pid.remote()]).wait(_ASK_S)[0]
        return self._pid

    @property
    def known_as(self) -> tuple[str, int | None]:
        """The worker's name, and its process id; None for an id that is unknown or belongs to another machine."""
        return self.name, None if self.spec.node else self._pid

    def kill(self) -> None:
        """End the process at once."""
        ray.kill(self.handle)


@dataclass
class Pending(Generic[R]):
    """One pending call on several workers. Each worker's result is an R."""

    call: str
    workers: list[Worker]
    refs: list[Any]

    def wait(self, deadline_s: float, knob: str = DEADLINE_KNOB) -> list[R]:
        """Return all results in the workers' order.

        Raises WorkerError if any worker raised, WorkerDied if any process is gone, WorkerTimeout after `deadline_s`
        seconds. WorkerError and WorkerDied are raised even if other workers are still busy, because these may wait
        forever for the failed rank.
        """
        end = time.monotonic() + deadline_s
        answers: dict[Any, Answer] = {}
        failures: list[Failure] = []

        def seconds_left() -> float:
            return end - time.monotonic()

        with _explain_long_wait(self.workers, self.call, self.late_workers, deadline_s, knob):
            for ended_refs in _ended_calls(self.refs, seconds_left):
                ended_answers = self._get_answers(ended_refs)
                answers |= ended_answers
                new_failures = [failure for failure, _ in ended_answers.values() if failure]
                if new_failures:
                    failures += new_failures
                    # `seconds_left` reads the new end.
                    end = min(end, time.monotonic() + _OTHERS_S)
        if failures and len(answers) < len(self.refs):
            raise WorkerError(self.call, failures)
        if len(answers) < len(self.refs):
            names = [worker.name for worker, ref in zip(self.workers, self.refs) if ref not in answers]
            raise WorkerTimeout(self.call, names, deadline_s, knob)
        return _results(self.call, [answers[ref] for ref in self.refs])

    def late_workers(self) -> list[Worker]:
        """Return the workers that have not answered."""
        waiting = set(ray.wait(self.refs, num_returns=len(self.refs), timeout=0, fetch_local=False)[1])
        return [worker for worker, ref in zip(self.workers, self.refs) if ref in waiting]

    def dead_workers(self) -> list[Worker]:
        """Return the workers whose processes are gone, according to their answers."""
        ended_refs, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=_CALLS_LOOK_S)
        lost_refs = {ref for ref in ended_refs if _is_lost(ref)}
        return [worker for worker, ref in zip(self.workers, self.refs) if ref in lost_refs]

    def _get_answers(self, refs: Sequence[Any]) -> dict[Any, Answer]:
        """Return the answers of calls that have ended. Raises WorkerDied."""
        try:
            return dict(zip(refs, ray.get(refs, timeout=_ASK_S)))
        except RayActorError as error:
            dead = self.dead_workers()
            raise WorkerDied(self.call, [worker.name for worker in dead], _explain_death(error, dead)) from error


def _ended_calls(refs: Sequence[Any], seconds_left: Callable[[], float]) -> Iterator[list[Any]]:
    """Yield lists of refs whose calls have ended, until all have ended or `seconds_left()` is 0.

    The cost is linear in the number of calls, since each wait includes all calls. A call that ends while others are
    running is yielded up to `_CALLS_LOOK_S` late. If all calls end together, none is late.
    """
    waiting = list(refs)
    look_s = _FIRST_LOOK_S
    while waiting and (seconds := seconds_left()) > 0:
        ended_refs, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=min(look_s, seconds))
        look_s = min(_CALLS_LOOK_S, 2 * look_s)
        if ended_refs:
            yield ended_refs


def _is_lost(ref: Any) -> bool:
    try:
        ray.get(ref, timeout=_ASK_S)
    except RayActorError:
        return True
    return False


def _explain_long_wait(
    workers: Sequence[Worker], call: str, late_workers: Callable[[], Sequence[Worker]], deadline_s: float, knob: str
) -> AbstractContextManager[None]:
    """Return a context manager within which `Waits` explains the wait for a call if it takes long."""
    waits = workers[0].spec.waits if workers else None
    if waits is None:
        return nullcontext()
    return waits.wait(call, lambda: [worker.known_as for worker in late_workers()], deadline_s, knob)


def _results(call: str, answers: Sequence[Answer]) -> list[Any]:
    """Return every worker's result. Raises WorkerError if any worker raised."""
    if failures := [failure for failure, _ in answers if failure]:
        raise WorkerError(call, failures)
    return [result for _, result in answers]


def as_completed(
    pending: Sequence[Pending[Any]], deadline_s: float, knob: str = DEADLINE_KNOB
) -> Iterator[tuple[int, list[Any] | Exception]]:
    """Yield (index, results or exception) in completion order, like `concurrent.futures.as_completed`.

    The exception is the one that `Pending.wait` would raise.
    """
    workers: list[Worker] = []
    call_index: dict[Any, int] = {}
    # Index of a call whose outcome was not yielded yet -> number of workers without an answer.
    unanswered: dict[int, int] = {}
    for index, pending_call in enumerate(pending):
        workers += pending_call.workers
        call_index |= dict.fromkeys(pending_call.refs, index)
        unanswered[index] = len(pending_call.refs)
    calls = " and ".join(dict.fromkeys(pending_call.call for pending_call in pending))
    end = time.monotonic() + deadline_s

    def late_workers() -> list[Worker]:
        return list(chain.from_iterable(pending_call.late_workers() for pending_call in pending))

    with _explain_long_wait(workers, calls, late_workers, deadline_s, knob):
        for ref in chain.from_iterable(_ended_calls(list(call_index), lambda: end - time.monotonic())):
            index = call_index[ref]
            if index not in unanswered:
                # The outcome was yielded when the first worker failed.
                continue
            unanswered[index] -= 1
            # The process is gone, or the answer (failure, result) has a failure.
            has_failed = _is_lost(ref) or ray.get(ref)[0] is not None
            if has_failed or not unanswered[index]:
                del unanswered[index]
                yield index, _call_outcome(pending[index], has_failed)
        for index in sorted(unanswered):
            late_names = [worker.name for worker in pending[index].late_workers()]
            yield index, WorkerTimeout(pending[index].call, late_names, deadline_s, knob)


def _call_outcome(pending: Pending[Any], has_failed: bool) -> list[Any] | Exception:
    """Return a call's results or its exception. has_failed: return the exception even if other workers are busy."""
    ended = pending
    if has_failed:
        # The same call on the workers that have answered, so that the wait below does not wait for the others.
        ended_refs = set(ray.wait(pending.refs, num_returns=len(pending.refs), timeout=0)[0])
        pairs = [(worker, ref) for worker, ref in zip(pending.workers, pending.refs) if ref in ended_refs]
        ended = Pending(pending.call, [worker for worker, _ in pairs], [ref for _, ref in pairs])
    try:
        return ended.wait(1.0)
    except (WorkerDied, WorkerError, WorkerTimeout) as error:
        return error


class WorkerGroup:
    """The ranks of one trainer. Every call goes to all ranks."""

    def __init__(self, specs: Sequence[WorkerSpec], deadline_s: float) -> None:
        self.workers = [Worker(spec) for spec in specs]
        self.deadline_s = deadline_s
        # Compiled graph for `call` and `run`; None for ordinary calls.
        self.graph: Graph | None = None
        self._on_graph_loss: Callable[[str], None] = lambda reason: None

    def __len__(self) -> int:
        return len(self.workers)

    def part(self, ranks: Sequence[int]) -> "WorkerGroup":
        """Return some of the ranks as a group. Its calls never go through a compiled graph."""
        group = WorkerGroup([], self.deadline_s)
        group.workers = [self.workers[rank] for rank in ranks]
        return group

    def built(self) -> Pending[None]:
        """Return the pending construction of all ranks."""
        return Pending("start-up", self.workers, [worker._built for worker in self.workers])

    def start(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Start `method` with the same arguments on every rank."""
        return self._start_call((method.__name__, [args] * len(self), kwargs))

    def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Return each rank's result of `method` with the same arguments."""
        return self._call_ranks((method.__name__, [args] * len(self), kwargs))

    def run(self, method: Callable[[Any, *Ts], R], per_rank: Sequence[tuple[*Ts]]) -> list[R]:
        """Return each rank's result of `method`. per_rank: each rank's arguments."""
        return self._call_ranks((method.__name__, per_rank, {}))

    def compile(self, buffer_bytes: int, on_loss: Callable[[str], None] = lambda reason: None) -> None:
        """Send `call` and `run` through a compiled graph from now on. Results are the same. Raises GraphUnavailable.

        on_loss: called with the reason when the graph breaks although all ranks are alive. Later calls are then
        ordinary ones. on_loss may raise.
        """
        self._on_graph_loss = on_loss
        # Before the graph begins to read, so that idle workers do not use a core each.
        ray.get([worker.handle.read_patiently.remote() for worker in self.workers], timeout=self.deadline_s)
        self.graph = Graph([worker.handle for worker in self.workers], buffer_bytes)

    def uncompile(self) -> None:
        """Send `call` and `run` as ordinary calls from now on."""
        if self.graph:
            self.graph.close()
            self.graph = None

    def call_at_once(self, method: Callable[[Any, *Ts], object], *args: *Ts) -> None:
        """Call a short, thread-safe method on all ranks, also while other methods run. Do not wait for answers."""
        for worker in self.workers:
            worker.handle.call_at_once.remote(method.__name__, args)

    def outcomes(self, method: Callable[[Any, float], R | None], deadline_s: float, knob: str) -> list[R]:
        """Wait for work that each rank does on a background thread; return each rank's outcome. Any thread may call it.

        method: takes a number of seconds, waits at most that long for the work, and returns its outcome, or None if the
        work has not ended. Raises the errors of `Pending.wait`.
        """
        name = method.__name__
        end = time.monotonic() + deadline_s
        outcomes: dict[str, R] = {}
        while busy := [worker for worker in self.workers if worker.name not in outcomes]:
            if time.monotonic() > end:
                raise WorkerTimeout(name, [worker.name for worker in busy], deadline_s, knob)
            refs = [worker.handle.ask.remote(name, _OUTCOME_WAIT_S) for worker in busy]
            answers = Pending[R | None](name, busy, refs).wait(_ASK_S)
            outcomes |= {worker.name: answer for worker, answer in zip(busy, answers) if answer is not None}
        return [outcomes[worker.name] for worker in self.workers]

    def kill(self) -> None:
        """End all processes at once."""
        # Workers first, because closing the graph would wait for the current step.
        for worker in self.workers:
            worker.kill()
        if self.graph:
            self.graph.close()

    def _start_call(self, message: Message) -> Pending[Any]:
        method, per_rank, kwargs = message
        per_rank = put_common(per_rank)
        refs = [worker.handle.call.remote(method, args, kwargs) for worker, args in zip(self.workers, per_rank)]
        return Pending(method, self.workers, refs)

    def _call_ranks(self, message: Message) -> list[Any]:
        """Make a call through the graph if there is one; return the results. Raises the errors of `Pending.wait`."""
        if self.graph is None:
            return self._start_call(message).wait(self.deadline_s)
        method = message[0]
        try:
            with _explain_long_wait(self.workers, method, lambda: self.workers, self.deadline_s, DEADLINE_KNOB):
                answers = self.graph.call(message, self.deadline_s)
        except TimeoutError as error:
            names = [worker.name for worker in self.workers]
            raise WorkerTimeout(method, names, self.deadline_s, DEADLINE_KNOB) from error
        except RayError as error:
            # A separate call for each worker, so that one dead process does not hide the state of the others.
            pid_calls = [Pending[int]("pid", [worker], [worker.handle.pid.remote()]) for worker in self.workers]
            dead = list(chain.from_iterable(call.dead_workers() for call in pid_calls))
            if dead or isinstance(error, RayActorError):
                # All ranks are named if Ray reports a dead actor and each process still answers.
                names = [worker.name for worker in dead or self.workers]
                raise WorkerDied(method, names, _explain_death(error, dead)) from error
            return self._repeat_call(message, error)
        return _results(method, answers)

    def _repeat_call(self, message: Message, error: RayError) -> list[Any]:
        """Repeat a call that broke the graph as ordinary calls. Raises GraphBroken if a rank has begun the call."""
        assert self.graph
        reason = str(error).strip().splitlines()[0]
        counts = ray.get([worker.handle.graph_calls.remote() for worker in self.workers], timeout=self.deadline_s)
        # A rank counts a call when it begins, the graph when all ranks have answered: a rank with one more has begun.
        begun = [worker.name for worker, count in zip(self.workers, counts) if count != self.graph.calls]
        self.uncompile()
        if begun:
            raise GraphBroken(
                f"the compiled graph broke ({reason}) while {', '.join(begun)} did {message[0]}: how far is not known; "
                "resume from the last checkpoint"
            )
        self._on_graph_loss(reason)
        return self._start_call(message).wait(self.deadline_s)


def _explain_death(error: RayError, dead: Sequence[Worker]) -> str:
    """Return the reason why the `dead` workers are gone: the loss of their nodes, or the end of a process."""
    leases = {worker.spec.node.id: worker.spec.node for worker in dead if worker.spec.node}
    if names := [lease.name for lease in leases.values() if lease.is_gone()]:
        return f"node {', '.join(names)} is gone"
    # Ray's text is a page on why workers die in general, and one sentence about this worker: keep that sentence.
    detail = re.search(r"exit detail: ([^.\n]*)", str(error))
    return detail.group(1).strip() if detail else "its process is gone"
