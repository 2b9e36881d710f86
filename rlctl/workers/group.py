"""The driver's side of worker processes: `Worker` (one) and `WorkerGroup` (ranks called in lockstep).

Every wait has a deadline and names the worker and the call (no silent wait). Errors come as `WorkerError`,
`WorkerDied` or `WorkerTimeout`. A call can be started and gathered later (`Pending`), so that trainer and
generator work at the same time.

A method is named by itself, unbound: `group.call(TrainerWorker.info)`. Only its name travels, so a method of a Protocol
that the hosted class fulfils does as well; a type checker knows the arguments and the results.
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
# Time of the first look at calls, and the longest time between two looks.
_FIRST_LOOK_S = 0.01
_CALLS_LOOK_S = 0.2
# Longest time of one question for an outcome.
_OUTCOME_WAIT_S = 2.0
# Time that the other ranks have to fail or end, once one has failed.
_OTHERS_S = 10.0


@dataclass(frozen=True)
class WorkerSpec:
    """Recipe of a worker process."""

    name: str
    # Builds the worker; picklable, runs in the process.
    make: Callable[[], Any]
    # Set before `make` runs.
    env: dict[str, str] = field(default_factory=dict)
    log: str | None = None
    threads: int = 1
    # Node of the process; None on a run that has only this machine.
    node: NodeLease | None = None
    # Explains calls that take long; None: nobody does.
    waits: Waits | None = None


class Worker:
    """One worker process. `built` must have been waited for before the first call."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        # Two slots more than the worker's threads: `pid` and `ask` answer while they are busy.
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
        """Return the pending construction."""
        return Pending("start-up", [self], [self._built])

    def start(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> "Pending[R]":
        """Start one call; its result is `Pending.wait(...)[0]`."""
        name = method.__name__
        return Pending(name, [self], [self.handle.call.remote(name, args, kwargs)])

    async def call(
        self, deadline_s: float, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Make one call on an event loop and await its result. Raises the errors of `Pending.wait`.

        A cancelled call goes on in the worker. Every call must have ended before Ray shuts down.
        """
        name = method.__name__
        ref = self.handle.call.remote(name, args, kwargs)
        answer = ref.future()
        pending = Pending[R](name, [self], [ref])
        with _explain_long_wait([self], name, pending.late_workers, deadline_s, DEADLINE_KNOB):
            try:
                async with asyncio.timeout(deadline_s):
                    await done(answer)
            except TimeoutError:
                raise WorkerTimeout(name, [self.name], deadline_s, DEADLINE_KNOB) from None
        try:
            (result,) = _results(name, [answer.result()])
        except RayActorError as error:
            reason = await asyncio.to_thread(_explain_death, error, [self])
            raise WorkerDied(name, [self.name], reason) from error
        return cast(R, result)

    @property
    def lost_its_node(self) -> bool:
        """True if the worker's node is gone: nothing can be started there."""
        return self.spec.node is not None and not self.spec.node.lives()

    def meeting_point(self) -> tuple[str, int]:
        """Return an address and a free port of the worker's node, where processes of all nodes can meet it."""
        address = self.spec.node.address if self.spec.node else LOOPBACK
        pending_port = Pending[int]("free_port", [self], [self.handle.free_port.remote(address)])
        return address, pending_port.wait(_ASK_S)[0]

    def pid(self) -> int:
        """Return the worker's process id, also while a method runs."""
        self._pid = Pending[int]("pid", [self], [self.handle.pid.remote()]).wait(_ASK_S)[0]
        return self._pid

    @property
    def known_as(self) -> tuple[str, int | None]:
        """The worker's name, and its process id if that is known and belongs to this machine."""
        return self.name, None if self.spec.node else self._pid

    def kill(self) -> None:
        """End the process at once."""
        ray.kill(self.handle)


@dataclass
class Pending(Generic[R]):
    """Pending calls on several workers, with an R from each."""

    call: str
    workers: list[Worker]
    refs: list[Any]

    def wait(self, deadline_s: float, knob: str = DEADLINE_KNOB) -> list[R]:
        """Return all results in the workers' order.

        Raises WorkerError if any worker raised, WorkerDied if any process is gone (both though others still work:
        ranks may wait for the failed one without end), WorkerTimeout after `deadline_s` seconds.
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
        """Return the workers whose processes are gone, by their answers."""
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
    """Yield the refs of calls that have ended, several together, until all have ended or `seconds_left()` is 0.

    The cost is linear in the number of calls: each wait looks at all calls. A call that fails while others
    work is yielded at most `_CALLS_LOOK_S` late; where all end together nothing is late.
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
    """Return a context in which `Waits` explains the wait for a call, if the wait lasts."""
    waits = workers[0].spec.waits if workers else None
    if waits is None:
        return nullcontext()
    return waits.wait(call, lambda: [worker.known_as for worker in late_workers()], deadline_s, knob)


def _results(call: str, answers: Sequence[Answer]) -> list[Any]:
    """Return every worker's result. Raises WorkerError if any raised."""
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
    # By the index of a call: the number of workers without an answer. A call whose outcome was yielded is not here.
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
                continue
            unanswered[index] -= 1
            has_failed = _is_lost(ref) or ray.get(ref)[0] is not None
            if has_failed or not unanswered[index]:
                del unanswered[index]
                yield index, _call_outcome(pending[index], has_failed)
        for index in sorted(unanswered):
            late_names = [worker.name for worker in pending[index].late_workers()]
            yield index, WorkerTimeout(pending[index].call, late_names, deadline_s, knob)


def _call_outcome(pending: Pending[Any], has_failed: bool) -> list[Any] | Exception:
    """Return a call's results or exception; the exception of a failed call, though other workers are still busy."""
    if has_failed:
        ended_refs = set(ray.wait(pending.refs, num_returns=len(pending.refs), timeout=0)[0])
        pairs = [(worker, ref) for worker, ref in zip(pending.workers, pending.refs) if ref in ended_refs]
        pending = Pending(pending.call, [worker for worker, _ in pairs], [ref for _, ref in pairs])
    try:
        return pending.wait(1.0)
    except (WorkerDied, WorkerError, WorkerTimeout) as error:
        return error


class WorkerGroup:
    """The ranks of one trainer: every call goes to all ranks together."""

    def __init__(self, specs: Sequence[WorkerSpec], deadline_s: float) -> None:
        self.workers = [Worker(spec) for spec in specs]
        self.deadline_s = deadline_s
        # The compiled graph that calls go through; None for ordinary calls.
        self.graph: Graph | None = None
        self._on_graph_loss: Callable[[str], None] = lambda reason: None

    def __len__(self) -> int:
        return len(self.workers)

    def part(self, ranks: Sequence[int]) -> "WorkerGroup":
        """Return some of the ranks as a group, whose calls never go through a compiled graph."""
        group = WorkerGroup([], self.deadline_s)
        group.workers = [self.workers[rank] for rank in ranks]
        return group

    def built(self) -> Pending[None]:
        """Return the construction of all ranks."""
        return Pending("start-up", self.workers, [worker._built for worker in self.workers])

    def start(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Start `method` with the same arguments on every rank."""
        return self._start_call((method.__name__, [args] * len(self), kwargs))

    def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Return each rank's result of `method` with the same arguments."""
        return self._call_ranks((method.__name__, [args] * len(self), kwargs))

    def run(self, method: Callable[[Any, *Ts], R], per_rank: Sequence[tuple[*Ts]]) -> list[R]:
        """Return each rank's result of `method` with that rank's own arguments."""
        return self._call_ranks((method.__name__, per_rank, {}))

    def compile(self, buffer_bytes: int, on_loss: Callable[[str], None] = lambda reason: None) -> None:
        """Send `call` and `run` through a compiled graph from now on, with the same meaning. Raises GraphUnavailable.

        on_loss: called with the reason when the graph breaks while its ranks live, and calls become ordinary ones
        again; it may raise.
        """
        self._on_graph_loss = on_loss
        ray.get([worker.handle.read_patiently.remote() for worker in self.workers], timeout=self.deadline_s)
        self.graph = Graph([worker.handle for worker in self.workers], buffer_bytes)

    def uncompile(self) -> None:
        """Send `call` and `run` as ordinary calls from now on."""
        if self.graph:
            self.graph.close()
            self.graph = None

    def call_at_once(self, method: Callable[[Any, *Ts], object], *args: *Ts) -> None:
        """Call a short method while others run (see `WorkerActor.call_at_once`); nobody waits for its answer."""
        for worker in self.workers:
            worker.handle.call_at_once.remote(method.__name__, args)

    def outcomes(self, method: Callable[[Any, float], R | None], deadline_s: float, knob: str) -> list[R]:
        """Return each rank's outcome of work on a thread of its own. May run on any thread.

        method: waits for some seconds, and returns None while the work goes on. Raises the errors of `Pending.wait`.
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
        # Before the graph's end, which would wait for the current step.
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
            # One call a worker: one process that is gone must not hide the others.
            pid_calls = [Pending[int]("pid", [worker], [worker.handle.pid.remote()]) for worker in self.workers]
            dead = list(chain.from_iterable(call.dead_workers() for call in pid_calls))
            if dead or isinstance(error, RayActorError):
                names = [worker.name for worker in dead or self.workers]
                raise WorkerDied(method, names, _explain_death(error, dead)) from error
            return self._repeat_call(message, error)
        return _results(method, answers)

    def _repeat_call(self, message: Message, error: RayError) -> list[Any]:
        """Do the call of a broken graph by ordinary calls. Raises GraphBroken if a rank has begun it."""
        assert self.graph
        reason = str(error).strip().splitlines()[0]
        counts = ray.get([worker.handle.graph_calls.remote() for worker in self.workers], timeout=self.deadline_s)
        names = [worker.name for worker, count in zip(self.workers, counts) if count != self.graph.calls]
        self.uncompile()
        if names:
            raise GraphBroken(
                f"the compiled graph broke ({reason}) while {', '.join(names)} did {message[0]}: how far is not known; "
                "resume from the last checkpoint"
            )
        self._on_graph_loss(reason)
        return self._start_call(message).wait(self.deadline_s)


def _explain_death(error: RayError, dead: Sequence[Worker]) -> str:
    """Return why the `dead` workers are gone: with their node, or their process alone."""
    leases = {worker.spec.node.id: worker.spec.node for worker in dead if worker.spec.node}
    if names := [lease.name for lease in leases.values() if lease.is_gone()]:
        return f"node {', '.join(names)} is gone"
    # Ray's text is a page on why workers die in general; one sentence there is about this one.
    detail = re.search(r"exit detail: ([^.\n]*)", str(error))
    return detail.group(1).strip() if detail else "its process is gone"
