"""The generator: a pool of engines that shares out requests, and replaces an engine that dies.

Groups stay whole on one engine, which shares their prompt's prefix. An engine that dies or hangs is rebuilt at
the trainer's version and its requests are sampled again, with the same seeds.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rlctl.generation.engine import MakeEngine
from rlctl.generation.requests import Columns, Completion, SampleRequest
from rlctl.generation.spec import EngineSpec, environment
from rlctl.refit.messages import Checks
from rlctl.refit.refit import EngineEnd, EnginesLost, Refit
from rlctl.refit.transport import Report
from rlctl.workers.errors import WorkerDied, WorkerError, WorkerTimeout
from rlctl.workers.group import Pending, Worker, WorkerSpec

Emit = Callable[..., None]
# Of an engine's calls that may run at the same time: collecting, submitting, a refit, a validation, memory, an abort.
_THREADS = 6


class GeneratorPool:
    """All engines of a run, at one weight version."""

    def __init__(
        self, spec: EngineSpec, devices: list[list[int]], logs: str, deadline_s: float, max_restarts: int, emit: Emit
    ) -> None:
        self._spec, self._devices, self._logs = spec, devices, logs
        self._deadline_s, self._max_restarts, self._emit = deadline_s, max_restarts, emit
        self._restarts_left = max_restarts
        self.version = -1
        self.asleep = False
        self.engines = [self._start(index) for index in range(len(devices))]

    def built(self) -> list[Pending]:
        """The construction of every engine."""
        return [engine.built() for engine in self.engines]

    def ends(self) -> list[EngineEnd]:
        """The engines as a refit sees them."""
        return [EngineEnd(engine, self._spec.tensor_parallel_size) for engine in self.engines]

    def open_refit(self, refit: Refit) -> None:
        """Connect every engine to the trainer; says how each takes weights in."""
        for engine, choice in zip(self.engines, refit.open(self.ends())):
            self._emit("refit_opened", engine=engine.name, transport=refit.options.kind, **vars(choice))

    def refit(self, refit: Refit, version: int, checks: Checks | None = None) -> Report:
        """Bring every engine to `version`; engines that slept are awake afterwards. Returns `Refit.run`'s report."""
        if self.asleep:
            self.call("wake", ["weights"])
        try:
            report = refit.run(self.ends(), version, checks)
        except EnginesLost as error:
            begin = time.perf_counter()
            rebuilt = [index for index in error.reasons if index not in error.intact]
            for index in rebuilt:
                self._count_loss(index, error.reasons[index])
            self._replace(rebuilt, refit, version, error.intact)
            report = {"seconds": time.perf_counter() - begin}
        if self.asleep:
            self.call("wake", ["kv_cache"])
        self.asleep = False
        self.version = version
        return report

    @property
    def at_a_time(self) -> int:
        """Rollouts that an engine decodes at a time."""
        return self._spec.max_num_seqs

    def replace(self, lost: dict[int, Exception], refit: Refit) -> None:
        """New engines, at the pool's version, for those that were lost, with the reason of each.

        Raises RuntimeError when `generation.max_restarts` are used up.
        """
        for index, reason in lost.items():
            self._count_loss(index, reason)
        self._replace(list(lost), refit, self.version)

    @property
    def sleeps(self) -> bool:
        """Whether engines stand on the trainer's devices and take turns with it."""
        return self._spec.sleeps

    def rest(self) -> None:
        """Give the devices' memory to the trainer until the next refit."""
        self.call("sleep")
        self.asleep = True

    def generate(self, requests: list[SampleRequest], refit: Refit) -> list[list[Completion]]:
        """Completions of every request, in order; engines that die meanwhile are replaced through `refit`."""
        answers: dict[str, list[Completion]] = {}
        while len(answers) < len(requests):
            missing = [request for request in requests if request.id not in answers]
            shares = share_out(missing, len(self.engines))
            pending = [engine.start("generate", share) for engine, share in zip(self.engines, shares)]
            lost = []
            for index, (share, part) in enumerate(zip(shares, pending)):
                columns = self._gather(index, part)
                if columns is None:
                    lost.append(index)
                    continue
                answers.update(zip([request.id for request in share], columns.split(share)))
            if lost:
                self._replace(lost, refit, self.version)
        return [answers[request.id] for request in requests]

    def call(self, method: str, *args: object) -> list[Any]:
        """One control call on every engine (`sleep`, `wake`, `memory`): the answers of those that live.

        One that is gone is found out, and replaced, by whatever next samples or changes weights.
        """
        answers = []
        for part in [engine.start(method, *args) for engine in self.engines]:
            with suppress(WorkerDied):
                answers.append(part.wait(self._deadline_s)[0])
        return answers

    def kill(self) -> None:
        """End all engines at once."""
        for engine in self.engines:
            engine.kill()

    def _start(self, index: int) -> Worker:
        env = environment(self._spec.device, self._devices[index])
        log = f"{self._logs}/engine-{index}.log"
        return Worker(WorkerSpec(f"engine-{index}", MakeEngine(self._spec), env, log, threads=_THREADS))

    def _gather(self, index: int, part: Pending) -> Columns | None:
        try:
            columns: Columns = part.wait(self._deadline_s)[0]
            return columns
        except (WorkerDied, WorkerTimeout, WorkerError) as error:
            self._count_loss(index, error)
            return None

    def _count_loss(self, index: int, reason: Exception) -> None:
        self._emit("engine_lost", engine=index, reason=str(reason))
        if self._restarts_left <= 0:
            raise RuntimeError(f"{reason}; generation.max_restarts={self._max_restarts} are used up") from reason
        self._restarts_left -= 1

    def _replace(self, lost: list[int], refit: Refit, version: int, behind: Sequence[int] = ()) -> None:
        """New engines for the `lost`, at `version`; those `behind` are sound and come to it too."""
        begin = time.monotonic()
        for index in lost:
            self.engines[index].kill()
            self.engines[index] = self._start(index)
        for index in lost:
            self.engines[index].built().wait(self._deadline_s)
        ends = self.ends()
        refit.resend(ends, [ends[index] for index in lost], [ends[index] for index in behind], version)
        for index in lost:
            self._emit("engine_restarted", engine=index, seconds=time.monotonic() - begin, version=version)


def share_out(requests: list[SampleRequest], engines: int) -> list[list[SampleRequest]]:
    """Requests of each engine: the costliest first, each to the engine with the fewest outstanding tokens.

    Deterministic; within an engine requests keep their order.
    """
    loads = [0] * engines
    taken: list[list[int]] = [[] for _ in range(engines)]
    for index in sorted(range(len(requests)), key=lambda i: (-requests[i].cost, i)):
        engine = loads.index(min(loads))
        loads[engine] += requests[index].cost
        taken[engine].append(index)
    return [[requests[index] for index in sorted(part)] for part in taken]
