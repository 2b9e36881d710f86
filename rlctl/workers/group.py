"""How the driver talks to worker processes: `Worker` (one) and `WorkerGroup` (ranks called in lockstep).

Every wait has a deadline and names the worker and the call (no silent wait). Errors come as `WorkerError`,
`WorkerDied` or `WorkerTimeout`. A call can be started and gathered later (`Pending`), so that trainer and
generator work at the same time.

A method is named by itself, unbound: `group.call(TrainerWorker.info)`. Only its name travels, so a method of a Protocol
that the hosted class fulfils does as well; a type checker knows the arguments and the results.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, TypeVarTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from rlctl.utils.ports import LOOPBACK
from rlctl.workers.actor import WorkerActor
from rlctl.workers.errors import Failure, WorkerDied, WorkerError, WorkerTimeout
from rlctl.workers.graph import Graph, GraphBroken
from rlctl.workers.nodes import NodeLease
from rlctl.workers.waits import Waits

P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")
DEADLINE_KNOB = "run.deadline_s"
_ASK_S = 60.0
# Once a rank has failed, the others have so long to fail too, or to end.
_OTHERS_S = 10.0


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker process is made of. `make` is picklable and runs in the process; `env` is set before.

    node: where it is to stand; None where there is but one. waits: where waits for it are told.
    """

    name: str
    make: Callable[[], Any]
    env: dict[str, str] = field(default_factory=dict)
    log: str | None = None
    threads: int = 1
    node: NodeLease | None = None
    waits: Waits | None = None


class Worker:
    """One worker process. `build` must have been gathered before the first call."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        # One slot more than the worker's threads: `pid` answers while they are busy.
        actor = ray.remote(num_cpus=0, max_concurrency=spec.threads + 1, max_restarts=0)(WorkerActor)
        if spec.node:
            actor = actor.options(scheduling_strategy=spec.node.strategy)
        self.handle = actor.remote(spec.name, spec.make, spec.env, spec.log, spec.threads)
        self._built = self.handle.build.remote()
        self._pid: int | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    def built(self) -> "Pending[None]":
        """The construction under way; gather it to know that the worker stands."""
        return Pending("start-up", [self], [self._built])

    def start(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> "Pending[R]":
        """Start one call; its result is `Pending.wait(...)[0]`."""
        name = method.__name__
        return Pending(name, [self], [self.handle.call.remote(name, args, kwargs)])

    @property
    def lost_its_node(self) -> bool:
        """Whether the node that it stood on is gone: nothing can be started there."""
        return self.spec.node is not None and not self.spec.node.lives()

    def meeting_point(self) -> tuple[str, int]:
        """An address and a free port of its node, where processes of all nodes can meet it."""
        address = self.spec.node.address if self.spec.node else LOOPBACK
        return address, int(self._ask("free_port", address))

    def pid(self) -> int:
        """Of its process; answers while a method runs."""
        self._pid = int(self._ask("pid"))
        return self._pid

    @property
    def known_as(self) -> tuple[str, int | None]:
        """Its name, and its process id if that is known and of this machine."""
        return self.name, None if self.spec.node else self._pid

    def _ask(self, method: str, *arguments: Any) -> Any:
        """What the host itself answers, at once. Raises WorkerDied, WorkerTimeout."""
        asked = Pending[Any](method, [self], [getattr(self.handle, method).remote(*arguments)])
        return asked.wait(_ASK_S)[0]

    def kill(self) -> None:
        """End the process at once."""
        ray.kill(self.handle)


@dataclass
class Pending(Generic[R]):
    """Calls under way on several workers, each of which returns an R."""

    call: str
    workers: list[Worker]
    refs: list[Any]

    def wait(self, deadline_s: float, knob: str = DEADLINE_KNOB) -> list[R]:
        """All results in the workers' order.

        Raises WorkerError if any worker raised, WorkerDied if any process is gone (both though others still work:
        ranks may wait for the one that failed for ever), WorkerTimeout after `deadline_s` seconds.
        """
        with waited_for(self.workers, self.call, self.late, deadline_s, knob):
            self._until_ready(deadline_s, knob)
        answers = ray.get(self.refs)
        pairs = [_pair(answer) for answer in answers]
        return results(self.call, pairs)

    def late(self) -> list[Worker]:
        """The workers that have not answered."""
        _, waiting = ray.wait(self.refs, num_returns=len(self.refs), timeout=0, fetch_local=False)
        return [worker for worker, ref in zip(self.workers, self.refs) if ref in waiting]

    def _until_ready(self, deadline_s: float, knob: str) -> None:
        end = time.monotonic() + deadline_s
        waiting, failures = list(self.refs), list[Failure]()
        while waiting:
            left = end - time.monotonic()
            if left <= 0 and failures:
                raise WorkerError(self.call, failures)
            if left <= 0:
                names = [worker.name for worker, ref in zip(self.workers, self.refs) if ref in waiting]
                raise WorkerTimeout(self.call, names, deadline_s, knob)
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            for failure in filter(None, map(self._failure, ready)):
                failures.append(failure)
                end = min(end, time.monotonic() + _OTHERS_S)

    def _failure(self, ref: Any) -> Failure | None:
        """What an answer that is there says went wrong. Raises WorkerDied."""
        try:
            return _pair(ray.get(ref, timeout=60))[0]
        except RayActorError as error:
            raise WorkerDied(self.call, self.dead(), _reason(error)) from error
        except GetTimeoutError:
            return None

    def dead(self) -> list[str]:
        """Names of the workers whose process is gone, as far as their answers tell."""
        names = []
        for worker, ref in zip(self.workers, self.refs):
            try:
                ray.get(ref, timeout=0.2)
            except RayActorError:
                names.append(worker.name)
            except GetTimeoutError:
                continue
        return names


def waited_for(
    workers: Sequence[Worker], call: str, late: Callable[[], Sequence[Worker]], deadline_s: float, knob: str
) -> AbstractContextManager[None]:
    """Have the wait for a call explained if it lasts."""
    waits = workers[0].spec.waits if workers else None
    if waits is None:
        return nullcontext()
    return waits.wait(call, lambda: [each.known_as for each in late()], deadline_s, knob)


def _pair(answer: Any) -> tuple[Failure | None, Any]:
    """(failure, result) of what a host answered, which of its own short methods is the one or the other alone."""
    if isinstance(answer, tuple):
        return answer
    return (answer, None) if isinstance(answer, Failure) else (None, answer)


def results(call: str, answers: Sequence[tuple[Failure | None, Any]]) -> list[Any]:
    """What every worker returned. Raises WorkerError if any raised."""
    failures = [failure for failure, _ in answers if isinstance(failure, Failure)]
    if failures:
        raise WorkerError(call, failures)
    return [result for _, result in answers]


def as_they_end(
    pending: Sequence[Pending[Any]], deadline_s: float, knob: str = DEADLINE_KNOB
) -> Iterator[tuple[int, list[Any] | Exception]]:
    """(index, results or the error that `Pending.wait` would raise) of several calls, each as soon as it is known."""
    workers = [worker for part in pending for worker in part.workers]
    calls = " and ".join(dict.fromkeys(part.call for part in pending))
    with waited_for(workers, calls, lambda: [worker for part in pending for worker in part.late()], deadline_s, knob):
        yield from _as_they_end(pending, deadline_s, knob)


def _as_they_end(
    pending: Sequence[Pending[Any]], deadline_s: float, knob: str
) -> Iterator[tuple[int, list[Any] | Exception]]:
    end = time.monotonic() + deadline_s
    open_refs = {ref: index for index, part in enumerate(pending) for ref in part.refs}
    while open_refs:
        ready, _ = ray.wait(list(open_refs), num_returns=1, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        index = open_refs.pop(ready[0])
        failed = _failed(ready[0])
        if not failed and index in open_refs.values():
            continue
        open_refs = {ref: other for ref, other in open_refs.items() if other != index}
        yield index, _outcome(pending[index], failed)
    for index in sorted(set(open_refs.values())):
        late = [worker.name for worker, ref in zip(pending[index].workers, pending[index].refs) if ref in open_refs]
        yield index, WorkerTimeout(pending[index].call, late, deadline_s, knob)


def _failed(ref: Any) -> bool:
    """Whether an answer that is there is a failure."""
    try:
        answer = ray.get(ref)
    except RayActorError:
        return True
    return isinstance(answer[0] if isinstance(answer, tuple) else answer, Failure)


def _outcome(pending: Pending[Any], failed: bool) -> list[Any] | Exception:
    """What a call gave; of a failed one that is still under way elsewhere, the failure."""
    if failed:
        ready, _ = ray.wait(pending.refs, num_returns=len(pending.refs), timeout=0)
        pairs = [(worker, ref) for worker, ref in zip(pending.workers, pending.refs) if ref in ready]
        pending = Pending(pending.call, [worker for worker, _ in pairs], [ref for _, ref in pairs])
    try:
        return pending.wait(1.0)
    except (WorkerDied, WorkerError, WorkerTimeout) as error:
        return error


class WorkerGroup:
    """The ranks of one trainer: every call goes to all of them together."""

    def __init__(self, specs: Sequence[WorkerSpec], deadline_s: float) -> None:
        self.workers = [Worker(spec) for spec in specs]
        self.deadline_s = deadline_s
        self._graph: Graph | None = None
        self._lost: Callable[[str], None] = lambda why: None

    def __len__(self) -> int:
        return len(self.workers)

    def built(self) -> Pending[None]:
        """The construction of all ranks."""
        return Pending("start-up", self.workers, [worker._built for worker in self.workers])

    def start(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Start `method` with the same arguments on every rank."""
        return self._start(method.__name__, [(args, kwargs)] * len(self.workers))

    def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Return what `method` gives on each rank with the same arguments."""
        return self._run(method.__name__, [args] * len(self.workers), kwargs)

    def run(self, method: Callable[[Any, *Ts], R], per_rank: Sequence[tuple[*Ts]]) -> list[R]:
        """Return what `method` gives on each rank with that rank's own arguments."""
        return self._run(method.__name__, per_rank, {})

    def compile(self, buffer_bytes: int, lost: Callable[[str], None] = lambda why: None) -> None:
        """From now on `call` and `run` go through a compiled graph, with the same meaning. Raises GraphUnavailable.

        lost: told why when the graph breaks while its ranks live, and calls become ordinary ones again; it may raise.
        """
        self._lost = lost
        ray.get([worker.handle.read_patiently.remote() for worker in self.workers], timeout=self.deadline_s)
        self._graph = Graph([worker.handle for worker in self.workers], buffer_bytes)

    @property
    def graph(self) -> Graph | None:
        """What calls go through; None for ordinary ones."""
        return self._graph

    def aside(self, method: Callable[[Any, *Ts], object], *args: *Ts) -> None:
        """Call a short method beside the running ones (see `WorkerActor.aside`); nobody waits for it."""
        for worker in self.workers:
            worker.handle.aside.remote(method.__name__, args)

    def kill(self) -> None:
        """End all processes at once."""
        # Before the graph's end, which would wait for a step under way.
        for worker in self.workers:
            worker.kill()
        if self._graph:
            self._graph.close()

    def _run(self, method: str, per_rank: Sequence[tuple[Any, ...]], kwargs: dict[str, Any]) -> list[Any]:
        if self._graph is None:
            return self._start(method, [(args, kwargs) for args in per_rank]).wait(self.deadline_s)
        try:
            with waited_for(self.workers, method, lambda: self.workers, self.deadline_s, DEADLINE_KNOB):
                answers = self._graph.call((method, per_rank, kwargs), self.deadline_s)
        except TimeoutError as error:
            raise WorkerTimeout(method, [w.name for w in self.workers], self.deadline_s, DEADLINE_KNOB) from error
        except RayActorError as error:
            raise WorkerDied(method, self._gone() or [w.name for w in self.workers], _reason(error)) from error
        except RayError as error:
            if gone := self._gone():
                raise WorkerDied(method, gone, _reason(error)) from error
            return self._ordinarily(method, per_rank, kwargs, error)
        return results(method, answers)

    def _ordinarily(
        self, method: str, per_rank: Sequence[tuple[Any, ...]], kwargs: dict[str, Any], error: RayError
    ) -> list[Any]:
        """The call of a broken graph, once more by ordinary calls: if no rank has begun it, it is done but once."""
        assert self._graph
        why = str(error).strip().splitlines()[0]
        begun = ray.get([worker.handle.graph_calls.remote() for worker in self.workers], timeout=self.deadline_s)
        names = [worker.name for worker, count in zip(self.workers, begun) if count != self._graph.calls]
        self._graph.close()
        self._graph = None
        if names:
            what = f"the compiled graph broke ({why}) while {', '.join(names)} did {method}: how far is not known"
            raise GraphBroken(f"{what}; resume from the last checkpoint")
        self._lost(why)
        return self._run(method, per_rank, kwargs)

    def _gone(self) -> list[str]:
        """Workers whose process does not answer."""
        asked = [Pending[int]("pid", [worker], [worker.handle.pid.remote()]) for worker in self.workers]
        return [name for part in asked for name in part.dead()]

    def _start(self, method: str, inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Pending[Any]:
        refs = [worker.handle.call.remote(method, *item) for worker, item in zip(self.workers, inputs)]
        return Pending(method, self.workers, refs)


def _reason(error: RayError) -> str:
    # Ray's text is a page on why workers die in general; one sentence of it is about this one.
    detail = re.search(r"exit detail: ([^.\n]*)", str(error))
    return detail.group(1).strip() if detail else "its process is gone"
