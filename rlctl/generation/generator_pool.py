"""The generator: a pool of engines at one weight version. It replaces engines that die or hang.

A replacement gets the trainer's weight version. If an engine's node is gone, there is no replacement: the pool
continues with the other engines. If two engines raise the same error before they have sampled a token, the run ends.
"""

import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Concatenate, ParamSpec, TypeVar

from rlctl.generation.engine import Engine, MemoryPart
from rlctl.generation.spec import EngineSpec, build_engine
from rlctl.refit.by_node import RefitByNode
from rlctl.refit.protocol import Checks, LoadMode, RefitReport
from rlctl.refit.refit import EngineEnd, EnginesLost, Refit
from rlctl.refit.refit_plan import RefitPlan
from rlctl.workers.errors import EngineUnusable, NoEngineLeft, WorkerDied, WorkerError, WorkerTimeout
from rlctl.workers.group import Worker, WorkerSpec
from rlctl.workers.nodes import NodeLease
from rlctl.workers.user_logs import Emit
from rlctl.workers.waits import Waits

P = ParamSpec("P")
R = TypeVar("R")
# Threads of an engine's actor, one for each call that may run at the same time: collect, submit, refit, memory, abort.
_THREADS = 6
# Seconds between two checks, while an engine starts, that its node is still alive.
_SLICE_S = 5.0


@dataclass(frozen=True)
class EngineSlot:
    """Environment and node of an engine. A replacement of the engine gets the same slot."""

    # Environment variables of the engine's process.
    environment: dict[str, str]
    # Node of the engine; None: the cluster has only one node.
    node: NodeLease | None = None
    # Warns about calls of the engine that take long, see `WorkerSpec`.
    waits: Waits | None = None


class GeneratorPool:
    """All engines of a run, at one weight version."""

    def __init__(
        self,
        spec: EngineSpec,
        slots: list[EngineSlot],
        logs: str,
        deadline_s: float,
        max_restarts: int,
        emit: Emit,
        name: str = "engine",
    ) -> None:
        """Start the engines. name: begin of each engine's name."""
        self._spec = spec
        self._name = name
        self._slots = slots
        self._logs = logs
        self._deadline_s = deadline_s
        self._max_restarts = max_restarts
        self._emit = emit
        self._restarts_left = max_restarts
        # Errors that engines raised before they sampled any token, with digits replaced by #.
        self._early_errors: set[str] = set()
        self.version = spec.version
        self.asleep = False
        # None if the engines keep the weights that they were built with.
        self._refit: Refit | RefitByNode | None = None
        # Engine in each slot; None if its node is gone.
        self.slots: list[Worker | None] = [self._start_engine(index) for index in range(len(slots))]

    @property
    def engines(self) -> list[Worker]:
        """Engines whose nodes are not gone, in the order of their slots."""
        return [worker for worker in self.slots if worker]

    def wait_until_built(self) -> None:
        """Wait until every engine is built; emit each distinct note once. Raises the error of a failed construction."""
        for engine in self.engines:
            engine.built().wait(self._deadline_s)
        for note in dict.fromkeys(chain.from_iterable(self.call(Engine.notes))):
            self._emit("warning", what=note)

    @property
    def dtype(self) -> str:
        """dtype of the weights that engines serve."""
        return self._spec.dtype

    def ends(self) -> list[EngineEnd]:
        """Return the engines in the form that a refit needs."""
        return [EngineEnd(engine, self._spec.tensor_parallel_size) for engine in self.engines]

    def connect(self, refit: Refit | RefitByNode) -> None:
        """Connect every engine to `refit`, and use it for all later refits. Emit how each engine receives weights."""
        self._refit = refit
        try:
            choices = refit.open(self.ends())
        except EnginesLost as error:
            # No engine has sampled anything yet, so do not rebuild: raise the error of the engine that failed.
            raise next(iter(error.reasons.values())) from error
        names: dict[LoadMode, list[str]] = {}
        for engine, choice in zip(self.engines, choices):
            names.setdefault(choice, []).append(engine.name)
        for choice, engine_names in names.items():
            self._emit("refit_opened", engines=engine_names, transport=refit.options.kind, **vars(choice))

    def sync(self, version: int, checks: Checks | None = None) -> RefitReport:
        """Bring every engine to the trainer's `version`, and rebuild engines that are lost meanwhile.

        If the engines sleep, the trainer frees its memory first, and the engines are awake afterwards. checks: replaces
        the run's `refit.checksum`. Call this method, as every method that replaces engines, only while the trainer is
        at `version` and does nothing else.
        Raises RuntimeError when `generation.max_restarts` are used up, and the error of a trainer.
        """
        refit = self._open_refit
        rest_seconds = 0.0
        wake_seconds = 0.0
        if self.asleep:
            begin = time.perf_counter()
            refit.rest_trainers()
            rest_seconds = time.perf_counter() - begin
            wake_seconds = self._wake("weights")
        try:
            report = refit.run(self.ends(), version, checks)
        except EnginesLost as error:
            begin = time.perf_counter()
            # `EnginesLost` names engines by their places among `engines`.
            live = self._live
            broken = {live[place]: reason for place, reason in error.reasons.items() if place not in error.intact}
            for index, reason in broken.items():
                self._count_loss(index, reason)
            rebuilt = self._rebuild(list(broken), version, [live[place] for place in error.intact])
            report = RefitReport(seconds=time.perf_counter() - begin, rebuilt=tuple(rebuilt))
        if self.asleep:
            wake_seconds += self._wake("kv_cache")
        self.asleep = False
        self.version = version
        return replace(report, rest=rest_seconds, wake=wake_seconds)

    def _wake(self, part: MemoryPart) -> float:
        """Make all engines allocate a part of their memory again; return the seconds that this took."""
        begin = time.perf_counter()
        self.call(Engine.wake, part)
        return time.perf_counter() - begin

    @property
    def _open_refit(self) -> Refit | RefitByNode:
        if self._refit is None:
            raise RuntimeError("no refit is connected: the engines keep the weights that they were built with")
        return self._refit

    @property
    def plan(self) -> RefitPlan:
        """Refit plan that trainer and engines use."""
        return self._open_refit.plan

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return self._spec.max_model_len

    @property
    def at_a_time(self) -> int:
        """The most sequences that an engine decodes at a time."""
        return self._spec.max_num_seqs

    def replace(self, lost: dict[int, Exception], early: Collection[int] = ()) -> None:
        """Rebuild lost engines at the pool's version, which the trainer must still have. lost: slot -> reason.

        early: slots of engines that have sampled no token. Raises RuntimeError when `generation.max_restarts` are used
        up, and EngineUnusable if two engines raised the same error before any token.
        """
        for index, reason in lost.items():
            if index in early and isinstance(reason, WorkerError):
                self._refuse_repeated_error(index, reason)
            self._count_loss(index, reason)
        self._rebuild(list(lost), self.version)

    @property
    def sleeps(self) -> bool:
        """True if engines share GPUs with the trainer (colocated) and sleep while it works."""
        return self._spec.sleeps

    def rest(self) -> None:
        """Make all engines sleep until the next refit, so that their device memory is free for the trainer."""
        self.call(Engine.sleep)
        self.asleep = True

    def require_awake(self) -> None:
        """Raise RuntimeError if engines sleep: they have neither weights nor a cache to sample with."""
        if self.asleep:
            raise RuntimeError("the generator sleeps: sync it with the trainer before it samples")

    def call(self, method: Callable[Concatenate[Engine, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Make one control call (`sleep`, `wake`, `memory`) on every engine; return the answers of live engines.

        An engine that died is skipped here. The next sampling or weight change detects and replaces it.
        """
        answers = []
        pending_calls = [engine.start(method, *args, **kwargs) for engine in self.engines]
        for pending_call in pending_calls:
            with suppress(WorkerDied):
                answers.append(pending_call.wait(self._deadline_s)[0])
        return answers

    def forget_gone(self) -> None:
        """Remove the slots of engines whose nodes are gone, and renumber the others."""
        live = self._live
        self._slots = [self._slots[index] for index in live]
        self.slots = [self.slots[index] for index in live]

    def kill(self) -> None:
        """End all engines at once."""
        for engine in self.engines:
            engine.kill()

    @property
    def _live(self) -> list[int]:
        """Slots of `engines`, in their order."""
        return [index for index, _ in self._numbered_engines()]

    def _start_engine(self, index: int) -> Worker:
        slot = self._slots[index]
        spec = WorkerSpec(
            f"{self._name}-{index}",
            partial(build_engine, self._spec),
            slot.environment,
            f"{self._logs}/{self._name}-{index}.log",
            threads=_THREADS,
            node=slot.node,
            waits=slot.waits,
        )
        return Worker(spec)

    def _refuse_repeated_error(self, index: int, error: WorkerError) -> None:
        """Raise EngineUnusable if an earlier engine raised the same error before it had sampled a token."""
        failure = error.failures[0]
        text = f"{failure.type}: {failure.text}"
        # Replace numbers, because the same error of two engines differs in addresses, ids and sizes.
        kind = re.sub(r"0x[0-9a-fA-F]+|\d+", "#", text)
        if kind in self._early_errors:
            self._emit("engine_lost", engine=index, reason=str(error))
            raise EngineUnusable(
                f"{self._name}-{index} cannot sample, as the one before it: {text.splitlines()[0]}"
            ) from error
        self._early_errors.add(kind)

    def _count_loss(self, index: int, reason: Exception) -> None:
        """Emit the loss of an engine, and use one restart. Raises RuntimeError if none is left."""
        self._emit("engine_lost", engine=index, reason=str(reason))
        worker = self.slots[index]
        if worker and worker.lost_its_node:
            # The slot stays empty, so no restart is used.
            return
        if self._restarts_left <= 0:
            raise RuntimeError(f"{reason}; generation.max_restarts={self._max_restarts} are used up") from reason
        self._restarts_left -= 1

    def _rebuild(self, lost: Sequence[int], version: int, behind: Sequence[int] = ()) -> list[int]:
        """Start new engines in the `lost` slots; bring these engines and those in the slots `behind` to `version`.
        Return the rebuilt slots.

        behind: slots of intact engines that missed the version. They get the version at once and continue, while the
        new engines start. Engines that are lost meanwhile are rebuilt too, until all are at `version`. A slot whose
        node is gone stays empty. Raises NoEngineLeft if no engine remains, and RuntimeError when
        `generation.max_restarts` are used up.
        """
        begin = time.monotonic()
        # Slots of engines that were built, and of engines that still start.
        rebuilt = set[int]()
        starting = set[int]()
        while True:
            starting.update(self._start_replacements(lost))
            ends = {
                index: EngineEnd(worker, self._spec.tensor_parallel_size) for index, worker in self._numbered_engines()
            }
            behind = [index for index in behind if index in ends]
            # Slots of the engines passed to the refit. `EnginesLost` names engines by their places in this list.
            called = behind
            try:
                if self._refit and behind and starting:
                    # New engines take long to start. Meanwhile the engines `behind` sample with the new version.
                    self._refit.catch_up([ends[index] for index in behind], version)
                    behind = []
                fresh = self._wait_for(starting)
                starting = set()
                rebuilt.update(fresh)
                called = self._live
                if self._refit:
                    called_ends = [ends[index] for index in called]
                    fresh_ends = [ends[index] for index in fresh]
                    late_ends = [ends[index] for index in behind]
                    self._refit.resend(called_ends, fresh_ends, late_ends, version)
                break
            except EnginesLost as error:
                # An intact engine missed the version because another engine failed. It gets the version again. If all
                # named engines are intact, none is known to be the cause, and all are rebuilt.
                broken = [place for place in error.reasons if place not in error.intact] or list(error.reasons)
                for place in broken:
                    self._count_loss(called[place], error.reasons[place])
                lost = [called[place] for place in broken]
                failed = [called[place] for place in error.reasons]
                behind = sorted(set(behind).union(failed).difference(lost))
        # Without slots whose node was lost after the engine was built.
        restarted = [index for index in sorted(rebuilt) if self.slots[index]]
        for index in restarted:
            self._emit("engine_restarted", engine=index, seconds=time.monotonic() - begin, version=version)
        return restarted

    def _numbered_engines(self) -> list[tuple[int, Worker]]:
        """Return (slot, engine) of every slot whose node is not gone."""
        return [(index, worker) for index, worker in enumerate(self.slots) if worker]

    def _start_replacements(self, lost: Sequence[int]) -> list[int]:
        """Start new engines in the `lost` slots, and empty the slots whose nodes are gone. Return all these slots."""
        # A lost node may have had further engines, whose loss was not noticed yet.
        without_node = [index for index, worker in self._numbered_engines() if worker.lost_its_node]
        lost_slots = sorted({*lost, *without_node})
        for index in lost_slots:
            if worker := self.slots[index]:
                worker.kill()
                self.slots[index] = None if worker.lost_its_node else self._start_engine(index)
        return lost_slots

    def _wait_for(self, starting: Collection[int]) -> list[int]:
        """Wait until restarted engines are built; return their slots. Raises NoEngineLeft if the pool has no engine."""
        fresh = [index for index in sorted(starting) if self._wait_until_restarted(index)]
        for index in sorted({*starting} - {*fresh}):
            self.slots[index] = None
            lease = self._slots[index].node
            node = lease.name if lease else "this machine"
            reason = f"node {node} is gone, the run goes on with {len(self.engines)} of {len(self.slots)} engines"
            self._emit("engine_gone", engine=index, reason=reason)
        if not self.engines:
            raise NoEngineLeft("the nodes of all engines are gone")
        return fresh

    def _wait_until_restarted(self, index: int) -> bool:
        """Wait until a restarted engine is built; return False if its node is gone meanwhile."""
        worker = self.slots[index]
        end = time.monotonic() + self._deadline_s
        if worker is None:
            # The node was lost before an engine could be started.
            return False
        while True:
            try:
                # Wait in slices, so that the loss of the node is noticed.
                worker.built().wait(min(_SLICE_S, self._deadline_s))
                return True
            except (WorkerTimeout, WorkerDied) as error:
                if worker.lost_its_node:
                    worker.kill()
                    return False
                if isinstance(error, WorkerDied) or time.monotonic() > end:
                    raise
