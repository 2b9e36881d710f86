"""A refit as the driver runs it: both ends opened once, then one call a version, checked and timed.

Every wait has a deadline. What fails on the way says who and which tensor; engines that may hold a mixture come
back as `EnginesLost`, to be built anew.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

from rlctl.refit.plan import ITEM_BYTES, OWNERS_AT_ONCE, RefitPlan
from rlctl.refit.protocol import Checks, Header, Kind, Mode, PeerLost, RefitError, RefitReport, TransportSpec, Untouched
from rlctl.refit.sending import Holding, SendsWeights
from rlctl.refit.transport import Report
from rlctl.workers.errors import WorkerError, WorkerTimeout
from rlctl.workers.group import Pending, Worker, WorkerGroup, as_completed

KNOB = "refit.timeout_s"
MAX_BUFFER_BYTES = 5 << 30
# Both ends give up by themselves after timeout_s; the driver waits a little longer for what they have to say.
_GRACE_S = 10.0
_SETTLE_S = 10.0
# All weights travel in about this many chunks, and a rank's share in at least a quarter of as many, unless they become
# so small that starting them takes longer than sending them. The first one's packing and the last one's loading hide
# behind nothing: those are as small as pays. A broadcast starts slower (Qwen3-8B in 48.7 ms instead of 49.4 so).
_CHUNKS = {"shm": 24, "ipc": 24, "broadcast": 12}
# Engines that copy out of the trainer's own memory have nothing to pack: few chunks, so that starting them is nothing.
_CHUNKS_COLOCATED = 4
_LEAST_BUFFER_BYTES = 128 << 20


class ReceivesWeights(Protocol):
    """What a hosted engine offers the driver's `Refit`, whoever samples."""

    def refit_open(self, spec: TransportSpec, plan: RefitPlan, first_rank: int, mode: Mode, in_flight: bool) -> Any:
        """Join the refit transport, and return how new weights are taken in.

        in_flight: requests go on during a refit.
        """

    def refit_receive(self, header: Header) -> Report:
        """Bring the engine to a version between two steps; running requests go on with it, their KV kept.

        A failure leaves the engine poisoned (it samples no more), unless it raises `Untouched`.
        """


@dataclass(frozen=True)
class EngineEnd:
    """One engine: its process, and the number of workers (tensor-parallel ranks) behind it."""

    worker: Worker
    ranks: int


@dataclass(frozen=True)
class Options:
    """How a run refits. folder: a place in the host's memory. colocated: see `TransportSpec`.

    in_flight: engines sample during a refit. checks: of every refit.
    """

    kind: Kind
    dtype: str
    mode: Mode
    num_buffers: int
    buffer_memory_ratio: float
    timeout_s: float
    folder: str
    checks: Checks
    colocated: bool
    in_flight: bool


class EnginesLost(RuntimeError):
    """Engines that did not come to the version, by index: dead, poisoned, or (see `intact`) as they were before."""

    def __init__(self, reasons: dict[int, Exception]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(str(reason) for reason in reasons.values()))

    @property
    def intact(self) -> list[int]:
        """Those whose live weights were not touched: they need the version again, but no new process."""
        return [
            index
            for index, reason in self.reasons.items()
            if isinstance(reason, WorkerError) and reason.failures[0].type == Untouched.__name__
        ]


class Refit:
    """Brings engines to the trainer's version."""

    def __init__(self, trainers: WorkerGroup, options: Options) -> None:
        self._trainers, self.options = trainers, options
        holdings = trainers.call(SendsWeights.refit_holding, options.dtype)
        self.buffer_bytes = _buffer_bytes(holdings, options)
        edge_bytes = self.buffer_bytes if options.colocated else _LEAST_BUFFER_BYTES
        boxes = [holding.boxes for holding in holdings]
        self.plan = RefitPlan.build(holdings[0].layout, boxes, self.buffer_bytes, edge_bytes)
        self._opened = False

    def open(self, engines: list[EngineEnd]) -> list[Any]:
        """Connect both ends; again after an engine was replaced. Returns each engine's `intake.Choice`.

        Raises EnginesLost, or what a trainer raised.
        """
        spec = self._spec(sum(engine.ranks for engine in engines))
        senders = []
        if spec.rendezvous or not self._opened:
            senders.append(self._trainers.start(SendsWeights.refit_open, spec, self.plan))
        opening = []
        for engine, first in zip(engines, _first_ranks(engines)):
            opening.append(
                engine.worker.start(
                    ReceivesWeights.refit_open, spec, self.plan, first, self.options.mode, self.options.in_flight
                )
            )
        choices = self._of_engines(opening, senders)
        self._opened = True
        return choices

    def run(self, engines: list[EngineEnd], version: int, checks: Checks | None = None) -> RefitReport:
        """Send `version` and make it live everywhere; `checks` other than the run's own if given.

        Returns the slowest engine's report, with the trainers' `pack` and the memory of both ends. Raises
        EnginesLost for engines that failed, and what a trainer raised if no engine was the cause.
        """
        header = Header(version, self.plan.digest, checks or self.options.checks)
        begin = time.perf_counter()
        sending = self._trainers.start(SendsWeights.refit_send, header)
        if not self._spec(0).rendezvous:
            self._gather([sending])
        written = time.perf_counter() - begin
        receiving = [engine.worker.start(ReceivesWeights.refit_receive, header) for engine in engines]
        sent, reports = self._watch(engines, sending, receiving)
        report = _merged(sent, reports)
        # Engines that read what stands in memory know nothing of the time that it took to get there.
        return report if self._spec(0).rendezvous else replace(report, seconds=report.seconds + written)

    def rest_trainers(self) -> None:
        """Have the trainers give the device's memory to engines that share it."""
        self._trainers.call(SendsWeights.rest)

    def resend(self, engines: list[EngineEnd], fresh: list[EngineEnd], behind: list[EngineEnd], version: int) -> None:
        """Bring `fresh` (replaced) engines and those `behind` to `version`, which the others already have.

        Raises EnginesLost by the place in `engines`, or what a trainer raised.
        """
        if self._spec(0).rendezvous:
            self.open(engines)
            self.run(engines, version, "all")
            return
        places = [engines.index(engine) for engine in (*fresh, *behind)]
        try:
            self.open(fresh)
            header = Header(version, self.plan.digest, self.options.checks)
            self._of_engines(
                [engine.worker.start(ReceivesWeights.refit_receive, header) for engine in (*fresh, *behind)]
            )
        except EnginesLost as error:
            raise EnginesLost({places[index]: reason for index, reason in error.reasons.items()}) from error

    def _watch(
        self, engines: list[EngineEnd], sending: Pending[Report], receiving: list[Pending[Report]]
    ) -> tuple[list[Report], list[Report]]:
        """Wait for all, so that whoever fails is told to the others at once. Returns trainers' and engines' reports."""
        trainers = len(engines)
        answers: dict[int, list[Report]] = {}
        failed: dict[int, Exception] = {}
        for index, outcome in as_completed([*receiving, sending], self._patience, KNOB):
            if not isinstance(outcome, Exception):
                answers[index] = outcome
                continue
            failed[index] = outcome
            if index < trainers:
                first = _first_ranks(engines)[index]
                dropped = list(range(first, first + engines[index].ranks))
                self._trainers.aside(SendsWeights.refit_drop, dropped, str(outcome))
            elif not _blames_others(outcome):
                raise outcome
            elif len(failed) == 1:
                # A trainer may give up before Ray has noticed an engine's death, or because an engine stands still.
                failed |= _engines_failed(receiving)
                break
        if failed:
            raise _verdict(failed, trainers)
        return answers[trainers], [answers[index][0] for index in range(trainers)]

    @property
    def _patience(self) -> float:
        return self.options.timeout_s + _GRACE_S

    def _spec(self, receivers: int) -> TransportSpec:
        options = self.options
        spec = TransportSpec(
            options.kind, receivers, options.timeout_s, options.num_buffers, options.folder, colocated=options.colocated
        )
        if options.kind == "broadcast" and receivers:
            # Rank 0 keeps the store where all meet.
            host, port = self._trainers.workers[0].meeting_point()
            return replace(spec, host=host, port=port)
        return spec

    def _of_engines(self, pending: list[Pending[Any]], senders: Sequence[Pending[Any]] = ()) -> list[Any]:
        """What each engine's call gave. Raises EnginesLost by the place in `pending`, or what a trainer raised.

        senders: the trainers' end, if engines meet it: nobody waits then for those that wait for one that failed.
        """
        trainers, answers, failed = len(pending), dict[int, list[Any]](), dict[int, Exception]()
        for index, outcome in as_completed([*pending, *senders], self._patience, KNOB):
            if not isinstance(outcome, Exception):
                answers[index] = outcome
                continue
            failed[index] = outcome
            if index == trainers and _blames_others(outcome):
                failed |= _engines_failed(pending)
            if senders:
                break
        if failed:
            raise _verdict(failed, trainers)
        return [answers[index][0] for index in range(trainers)]

    def _gather(self, pending: list[Pending[Any]]) -> list[list[Any]]:
        return [part.wait(self._patience, KNOB) for part in pending]


def _first_ranks(engines: list[EngineEnd]) -> list[int]:
    """The transport's rank of each engine's first worker; rank 0 is the trainer's."""
    return [1 + sum(engine.ranks for engine in engines[:index]) for index in range(len(engines))]


def _buffer_bytes(holdings: list[Holding], options: Options) -> int:
    smallest = min(holding.device_bytes for holding in holdings)
    # A receiver holds buffers of several owners at a time: no more memory than those of one would take.
    most = min(int(options.buffer_memory_ratio * smallest), MAX_BUFFER_BYTES) // min(OWNERS_AT_ONCE, len(holdings))
    sent = sum(prod(shape) * ITEM_BYTES[dtype] for _, shape, dtype in holdings[0].layout)
    apart = min(sent, 4 * sent // len(holdings)) // _CHUNKS[options.kind]
    return min(most, max(sent // _CHUNKS_COLOCATED if options.colocated else apart, _LEAST_BUFFER_BYTES))


def _blames_others(failure: Exception) -> bool:
    return isinstance(failure, WorkerError) and failure.failures[0].type == PeerLost.__name__


def _engines_failed(receiving: list[Pending[Report]]) -> dict[int, Exception]:
    """What became of the engines that a trainer waited for in vain: one that does not answer now stands still."""
    outcomes = as_completed(receiving, _SETTLE_S, KNOB)
    return {index: outcome for index, outcome in outcomes if isinstance(outcome, Exception)}


def _verdict(failed: dict[int, Exception], trainers: int) -> Exception:
    """What a refit that failed raises: engines are to blame unless only the trainers failed."""
    lost = {index: reason for index, reason in failed.items() if index != trainers}
    for index, reason in lost.items():
        if isinstance(reason, WorkerTimeout) and trainers in failed:
            lost[index] = RefitError(f"{reason}: {failed[trainers]}")
    return EnginesLost(lost) if lost else failed[trainers]


def _merged(sent: list[Report], received: list[Report]) -> RefitReport:
    """Return the slowest engine's report, with the trainers' packing time and the memory that both ends hold."""
    slowest = max(received, key=lambda report: report["seconds"])
    return RefitReport(
        seconds=slowest["seconds"],
        bytes=slowest["bytes"],
        pack=max(report["pack"] for report in sent),
        wire=slowest["wire"],
        load=slowest["load"],
        commit=slowest["commit"],
        stall=max(report["stall"] for report in received),
        trainer_extra_bytes=max(report["extra_bytes"] for report in sent),
        engine_extra_bytes=max(report["extra_bytes"] for report in received),
    )
