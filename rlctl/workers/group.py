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
# Longest time between two looks at calls of which some have ended.
_FIRST_LOOK_S, _CALLS_LOOK_S = 0.01, 0.2
# Longest time of one question for an outcome.
_ASIDE_S = 2.0
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
        with _explained([self], name, Pending(name, [self], [ref]).late, deadline_s, DEADLINE_KNOB):
            try:
                async with asyncio.timeout(deadline_s):
                    await done(answer)
            except TimeoutError:
                raise WorkerTimeout(name, [self.name], deadline_s, DEADLINE_KNOB) from None
        try:
            (result,) = _results(name, [answer.result()])
        except RayActorError as error:
            why = await asyncio.to_thread(_reason, error, [self])
            raise WorkerDied(name, [self.name], why) from error
        return cast(R, result)

    @property
    def lost_its_node(self) -> bool:
        """True if its node is gone: nothing can be started there."""
        return self.spec.node is not None and not self.spec.node.lives()

    def meeting_point(self) -> tuple[str, int]:
        """Return an address and a free port of its node, where processes of all nodes can meet it."""
        address = self.spec.node.address if self.spec.node else LOOPBACK
        asked = Pending[int]("free_port", [self], [self.handle.free_port.remote(address)])
        return address, asked.wait(_ASK_S)[0]

    def pid(self) -> int:
        """Return its process id, also while a method runs."""
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
        answers, failures = dict[Any, Answer](), list[Failure]()

        def left() -> float:
            return end - time.monotonic()

        with _explained(self.workers, self.call, self.late, deadline_s, knob):
            for ready in _as_ready(self.refs, left):
                answers |= self._answers(ready)
                if found := [failure for ref in ready if ref in answers and (failure := answers[ref][0])]:
                    failures += found
                    end = min(end, time.monotonic() + _OTHERS_S)
        if failures and len(answers) < len(self.refs):
            raise WorkerError(self.call, failures)
        if len(answers) < len(self.refs):
            names = [worker.name for worker, ref in zip(self.workers, self.refs) if ref not in answers]
            raise WorkerTimeout(self.call, names, deadline_s, knob)
        return _results(self.call, [answers[ref] for ref in self.refs])

    def late(self) -> list[Worker]:
        """Return the workers that have not answered."""
        waiting = set(ray.wait(self.refs, num_returns=len(self.refs), timeout=0, fetch_local=False)[1])
        return [worker for worker, ref in zip(self.workers, self.refs) if ref in waiting]

    def dead(self) -> list[Worker]:
        """Return the workers whose processes are gone, by their answers."""
        ready, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=_CALLS_LOOK_S)
        answered = set(ready)
        return [worker for worker, ref in zip(self.workers, self.refs) if ref in answered and _is_lost(ref)]

    def _answers(self, ready: Sequence[Any]) -> dict[Any, Answer]:
        """Return the answers of calls that have ended. Raises WorkerDied."""
        try:
            return dict(zip(ready, ray.get(ready, timeout=_ASK_S)))
        except RayActorError as error:
            dead = self.dead()
            raise WorkerDied(self.call, [worker.name for worker in dead], _reason(error, dead)) from error


def _as_ready(refs: Sequence[Any], left: Callable[[], float]) -> Iterator[list[Any]]:
    """Yield calls that have ended, several together, until all have or no time is `left()`.

    The cost is linear in the number of calls: each wait looks at all calls. A call that fails while others
    work is yielded at most `_CALLS_LOOK_S` late; where all end together nothing is late.
    """
    waiting, look = list(refs), _FIRST_LOOK_S
    while waiting and (seconds := left()) > 0:
        ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=min(look, seconds))
        look = min(_CALLS_LOOK_S, 2 * look)
        if ready:
            yield ready


def _is_lost(ref: Any) -> bool:
    try:
        ray.get(ref, timeout=_ASK_S)
    except RayActorError:
        return True
    return False


def _explained(
    workers: Sequence[Worker], call: str, late: Callable[[], Sequence[Worker]], deadline_s: float, knob: str
) -> AbstractContextManager[None]:
    """Have the wait for a call explained if it lasts."""
    waits = workers[0].spec.waits if workers else None
    if waits is None:
        return nullcontext()
    return waits.wait(call, lambda: [each.known_as for each in late()], deadline_s, knob)


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
    workers = [worker for part in pending for worker in part.workers]
    calls = " and ".join(dict.fromkeys(part.call for part in pending))
    end = time.monotonic() + deadline_s
    index_of = {ref: index for index, part in enumerate(pending) for ref in part.refs}
    # By call: the number of workers without an answer; none once its outcome was yielded.
    left = {index: len(part.refs) for index, part in enumerate(pending)}
    with _explained(workers, calls, lambda: [each for part in pending for each in part.late()], deadline_s, knob):
        for ref in chain.from_iterable(_as_ready(list(index_of), lambda: end - time.monotonic())):
            index = index_of[ref]
            if index not in left:
                continue
            left[index] -= 1
            failed = _is_lost(ref) or ray.get(ref)[0] is not None
            if failed or not left[index]:
                del left[index]
                yield index, _call_outcome(pending[index], failed)
        for index in sorted(left):
            late = [worker.name for worker in pending[index].late()]
            yield index, WorkerTimeout(pending[index].call, late, deadline_s, knob)


def _call_outcome(pending: Pending[Any], failed: bool) -> list[Any] | Exception:
    """Return a call's results or exception; the exception of a failed call, though other workers are still busy."""
    if failed:
        ready = set(ray.wait(pending.refs, num_returns=len(pending.refs), timeout=0)[0])
        pairs = [(worker, ref) for worker, ref in zip(pending.workers, pending.refs) if ref in ready]
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
        self._lost: Callable[[str], None] = lambda why: None

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
        return self._answers((method.__name__, [args] * len(self), kwargs))

    def run(self, method: Callable[[Any, *Ts], R], per_rank: Sequence[tuple[*Ts]]) -> list[R]:
        """Return each rank's result of `method` with that rank's own arguments."""
        return self._answers((method.__name__, per_rank, {}))

    def compile(self, buffer_bytes: int, lost: Callable[[str], None] = lambda why: None) -> None:
        """Send `call` and `run` through a compiled graph from now on, with the same meaning. Raises GraphUnavailable.

        lost: called with the reason when the graph breaks while its ranks live, and calls become ordinary ones again;
        it may raise.
        """
        self._lost = lost
        ray.get([worker.handle.read_patiently.remote() for worker in self.workers], timeout=self.deadline_s)
        self.graph = Graph([worker.handle for worker in self.workers], buffer_bytes)

    def uncompile(self) -> None:
        """Send `call` and `run` as ordinary calls from now on."""
        if self.graph:
            self.graph.close()
            self.graph = None

    def aside(self, method: Callable[[Any, *Ts], object], *args: *Ts) -> None:
        """Call a short method while others run (see `WorkerActor.aside`); nobody waits for its answer."""
        for worker in self.workers:
            worker.handle.aside.remote(method.__name__, args)

    def outcomes(self, method: Callable[[Any, float], R | None], deadline_s: float, knob: str) -> list[R]:
        """Return each rank's outcome of work on a thread of its own. May run on any thread.

        method: waits for some seconds, and returns None while the work goes on. Raises the errors of `Pending.wait`.
        """
        name, end = method.__name__, time.monotonic() + deadline_s
        found: dict[str, R] = {}
        while waiting := [worker for worker in self.workers if worker.name not in found]:
            if time.monotonic() > end:
                raise WorkerTimeout(name, [worker.name for worker in waiting], deadline_s, knob)
            refs = [worker.handle.ask.remote(name, _ASIDE_S) for worker in waiting]
            answers = Pending[R | None](name, waiting, refs).wait(_ASK_S)
            found |= {worker.name: answer for worker, answer in zip(waiting, answers) if answer is not None}
        return [found[worker.name] for worker in self.workers]

    def kill(self) -> None:
        """End all processes at once."""
        # Before the graph's end, which would wait for the current step.
        for worker in self.workers:
            worker.kill()
        if self.graph:
            self.graph.close()

    def _start_call(self, message: Message) -> Pending[Any]:
        method, per_rank, kwargs = message
        common = put_common(per_rank)
        refs = [worker.handle.call.remote(method, args, kwargs) for worker, args in zip(self.workers, common)]
        return Pending(method, self.workers, refs)

    def _answers(self, message: Message) -> list[Any]:
        if self.graph is None:
            return self._start_call(message).wait(self.deadline_s)
        method = message[0]
        try:
            with _explained(self.workers, method, lambda: self.workers, self.deadline_s, DEADLINE_KNOB):
                answers = self.graph.call(message, self.deadline_s)
        except TimeoutError as error:
            raise WorkerTimeout(method, [w.name for w in self.workers], self.deadline_s, DEADLINE_KNOB) from error
        except RayError as error:
            # Each is asked on its own: one process that is gone must not hide the others.
            asked = [Pending[int]("pid", [worker], [worker.handle.pid.remote()]) for worker in self.workers]
            gone = [worker for part in asked for worker in part.dead()]
            if gone or isinstance(error, RayActorError):
                names = [worker.name for worker in gone or self.workers]
                raise WorkerDied(method, names, _reason(error, gone)) from error
            return self._repeat(message, error)
        return _results(method, answers)

    def _repeat(self, message: Message, error: RayError) -> list[Any]:
        """Do the call of a broken graph by ordinary calls. Raises GraphBroken if a rank has begun it."""
        assert self.graph
        why = str(error).strip().splitlines()[0]
        begun = ray.get([worker.handle.graph_calls.remote() for worker in self.workers], timeout=self.deadline_s)
        names = [worker.name for worker, count in zip(self.workers, begun) if count != self.graph.calls]
        self.uncompile()
        if names:
            what = f"the compiled graph broke ({why}) while {', '.join(names)} did {message[0]}: how far is not known"
            raise GraphBroken(f"{what}; resume from the last checkpoint")
        self._lost(why)
        return self._start_call(message).wait(self.deadline_s)


def _reason(error: RayError, dead: Sequence[Worker]) -> str:
    """Return why the `dead` workers are gone: with their node, or their process alone."""
    leases = {each.spec.node.id: each.spec.node for each in dead if each.spec.node}
    if names := [lease.name for lease in leases.values() if lease.is_gone()]:
        return f"node {', '.join(names)} is gone"
    # Ray's text is a page on why workers die in general; one sentence there is about this one.
    detail = re.search(r"exit detail: ([^.\n]*)", str(error))
    return detail.group(1).strip() if detail else "its process is gone"
