"""A refit as the driver runs it: both ends opened once, then one call per version, checked and timed.

Every wait has a deadline. A failure names its rank and tensor; engines that may hold a mixture are raised as
`EnginesLost`, to be rebuilt.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, TypeVar

from rlctl.models.adapters import LORA_A, LORA_B
from rlctl.preflight.memory import REFIT_GROUPS
from rlctl.refit.protocol import (
    Checks,
    EngineReport,
    Header,
    Interrupted,
    Kind,
    Mode,
    PeerLost,
    RefitError,
    RefitReport,
    SendReport,
    TransportSpec,
    Untouched,
)
from rlctl.refit.refit_plan import ITEM_BYTES, Layout, ReceivesWeights, RefitPlan
from rlctl.refit.sender import Holding, SendsWeights
from rlctl.workers.errors import WorkerError, WorkerTimeout
from rlctl.workers.group import Pending, Worker, WorkerGroup, as_completed
from rlctl.workers.shared_arguments import put_once

R = TypeVar("R")
KNOB = "refit.timeout_s"
MAX_BUFFER_BYTES = 5 << 30
# Both ends give up by themselves after timeout_s; the driver waits a little longer for their reports.
_GRACE_S = 10.0
_SETTLE_S = 10.0
# All weights travel in about this many chunks, and a rank's share in at least a quarter of as many, unless they become
# so small that starting them takes longer than sending them. The first one's packing and the last one's loading hide
# behind nothing: those are as small as pays. A broadcast starts slower (Qwen3-8B in 48.7 ms instead of 49.4 so).
_CHUNKS = {"shm": 24, "ipc": 24, "broadcast": 12}
# Engines that copy out of the trainer's own memory have nothing to pack: few chunks, so that starting them is nothing.
_CHUNKS_COLOCATED = 4
_LEAST_BUFFER_BYTES = 128 << 20
# Chunks of shared memory need no buffer: small ones are still in a cache when their checksums are taken (copy and
# sum of 256 MiB: 33 ms in pieces of 8 MiB, 35 of 128).
_CACHED_BYTES = 8 << 20


@dataclass(frozen=True)
class EngineEnd:
    """One engine of a refit."""

    worker: Worker
    # Workers (tensor-parallel ranks) behind it.
    ranks: int


@dataclass(frozen=True)
class RefitOptions:
    """Settings of every refit of a run."""

    kind: Kind
    # dtype in which every tensor travels.
    dtype: str
    mode: Mode
    num_buffers: int
    # Share of a device's memory that the buffers of one end may take.
    buffer_memory_ratio: float
    timeout_s: float
    # In the host's memory, see `TransportSpec`.
    folder: str
    checks: Checks
    # Trainer rank 0 and the one engine worker share their device.
    colocated: bool
    # Engines sample during a refit.
    in_flight: bool
    # Adapters are sent, and each engine proves that they are live.
    adapters: bool = False
    # Consecutive ranks that hold all weights together; 0: all ranks do. Others hold the same, and send nothing.
    ranks_a_copy: int = 0
    # Trainer rank that the plan counts as 0.
    first_rank: int = 0


class EnginesLost(RuntimeError):
    """Engines that did not come to the version, by index: dead, poisoned, or (see `intact`) as they were before."""

    def __init__(self, reasons: dict[int, Exception]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(str(reason) for reason in reasons.values()))

    @property
    def intact(self) -> list[int]:
        """Engines that need the version again, but no new process: untouched ones, and those that lost a peer."""
        return [index for index, reason in self.reasons.items() if _is_intact(reason)]


class Planned(NamedTuple):
    """Plan of all refits of a run."""

    plan: RefitPlan
    # Bytes of a buffer.
    buffer_bytes: int
    # One copy in Ray's store, for every rank and engine, rebuilt ones included.
    shared: RefitPlan


class Refit:
    """Brings engines to the trainer's version."""

    def __init__(self, trainers: WorkerGroup, options: RefitOptions, planned: Planned | None = None) -> None:
        """Make the plan, unless it is given as `make_plan` returns it."""
        self._trainers, self.options = trainers, options
        if planned is None:
            senders = range(options.ranks_a_copy or len(trainers))
            planned = make_plan(*ask_holdings(trainers, options.dtype, senders), options)
        self.plan, self.buffer_bytes, self._shared_plan = planned
        self._opened = False
        # Version of the adapters sent last, and the digest of their checksums.
        self._sent = (-1, 0)

    def open(self, engines: list[EngineEnd]) -> list[Any]:
        """Connect both ends, again after an engine was rebuilt; return each engine's `LoadMode`.

        Raises EnginesLost, or a trainer's error.
        """
        options = self.options
        spec = self.transport(sum(engine.ranks for engine in engines))
        senders = []
        if spec.rendezvous or not self._opened:
            senders.append(self._trainers.start(SendsWeights.refit_open, spec, self._shared_plan))
        plan, mode, in_flight = self._shared_plan, options.mode, options.in_flight
        opening = [
            engine.worker.start(ReceivesWeights.refit_open, spec, plan, first, mode, in_flight)
            for engine, first in zip(engines, _first_ranks(engines))
        ]
        modes, _ = self._await(opening, senders, self._drop_of(engines) if options.kind == "broadcast" else None)
        self._opened = True
        return modes

    def run(self, engines: list[EngineEnd], version: int, checks: Checks | None = None) -> RefitReport:
        """Send `version` and make it live everywhere; `checks` other than the run's own if given.

        Raises EnginesLost for engines that failed, and a trainer's error if no engine was the cause.
        """
        header = self._header(version, checks)
        begin = time.perf_counter()
        sending = self._trainers.start(SendsWeights.refit_send, header)
        if not self.transport(0).rendezvous:
            sending.wait(self._patience, KNOB)
        written = time.perf_counter() - begin
        receiving = [engine.worker.start(ReceivesWeights.refit_receive, header) for engine in engines]
        served, sent = self._await(receiving, [sending], self._drop_of(engines))
        if header.prove:
            self._sent = (version, sum(report.digest for report in sent) % 2**64)
            self._verify(version, engines, served)
        report = _merged_reports(served, sent)
        # Engines that read from memory do not know the time taken to write there.
        return report if self.transport(0).rendezvous else replace(report, seconds=report.seconds + written)

    def resend(self, engines: list[EngineEnd], fresh: list[EngineEnd], behind: list[EngineEnd], version: int) -> None:
        """Bring `fresh` (rebuilt) engines and those `behind` to `version`, which the others already have.

        Raises EnginesLost by the place in `engines`, or a trainer's error.
        """
        if self.transport(0).rendezvous:
            self.open(engines)
            self.run(engines, version, "all")
            return
        missing = [*fresh, *behind]
        try:
            self.open(fresh)
            header = self._header(version)
            served = self._await([engine.worker.start(ReceivesWeights.refit_receive, header) for engine in missing])[0]
            self._verify(version, missing, served)
        except EnginesLost as error:
            reasons = {engines.index(missing[index]): reason for index, reason in error.reasons.items()}
            raise EnginesLost(reasons) from error

    def _header(self, version: int, checks: Checks | None = None) -> Header:
        return Header(version, self.plan.digest, checks or self.options.checks, self.options.adapters)

    def _verify(self, version: int, engines: list[EngineEnd], reports: list[EngineReport]) -> None:
        """Raise EnginesLost for engines that do not prove to serve the adapters that the trainer sent."""
        if not self.options.adapters:
            return
        names = [entry.name for entry in self.plan.entries]
        a, b = (sum(name.endswith(end) for name in names) for end in (LORA_A, LORA_B))
        lost: dict[int, Exception] = {}
        for index, (engine, report) in enumerate(zip(engines, reports, strict=True)):
            proven = {(p.version, p.digest, p.a, p.b) for p in report.proofs}
            if len(report.proofs) == engine.ranks and proven == {(*self._sent, a, b)} and self._sent[0] == version:
                continue
            live = "; ".join(f"version {v} with {own_a} A and {own_b} B" for v, _, own_a, own_b in sorted(proven))
            sums = ", whose checksums differ" if {v for v, *_ in proven} == {version} else ""
            lost[index] = RefitError(
                f"{engine.worker.name} does not serve the adapters of version {version} with {a} A and {b} B that the "
                f"trainer sent: it proves {live or 'nothing'}{sums}"
            )
        if lost:
            raise EnginesLost(lost)

    def catch_up(self, behind: list[EngineEnd], version: int) -> None:
        """Bring engines to `version` alone, while the lost ones are being rebuilt. Raises as `run`."""
        if self.transport(0).rendezvous:
            self.open(behind)
            self.run(behind, version, "all")
            return
        header = self._header(version)
        served, _ = self._await([engine.worker.start(ReceivesWeights.refit_receive, header) for engine in behind])
        self._verify(version, behind, served)

    def rest_trainers(self) -> None:
        """Have the trainers give the device's memory to engines that share it."""
        self._trainers.call(SendsWeights.rest)

    @property
    def _patience(self) -> float:
        return self.options.timeout_s + _GRACE_S

    def transport(self, receivers: int) -> TransportSpec:
        """Return the transport of a refit to `receivers` engine workers."""
        options = self.options
        fixed = options.kind, receivers, options.timeout_s, options.num_buffers, options.folder
        spec = TransportSpec(*fixed, colocated=options.colocated, first_rank=options.first_rank)
        if options.kind == "broadcast" and receivers:
            # Rank 0 keeps the store where all meet.
            host, port = self._trainers.workers[0].meeting_point()
            return replace(spec, host=host, port=port)
        return spec

    def _drop_of(self, engines: list[EngineEnd]) -> Callable[[int, Exception], None]:
        """Return a function that tells the trainers of a failed engine; they tell the other engines."""
        firsts = [*_first_ranks(engines), 0]

        def drop(index: int, reason: Exception) -> None:
            ranks = list(range(firsts[index], firsts[index] + engines[index].ranks)) if index < len(engines) else []
            self._trainers.call_at_once(SendsWeights.refit_drop, ranks, str(reason))

        return drop

    def _await(
        self,
        engines: list[Pending[R]],
        trainers: Sequence[Pending[Any]] = (),
        drop: Callable[[int, Exception], None] | None = None,
    ) -> tuple[list[R], list[Any]]:
        """Return each engine's answer, and the trainers' if engines meet them in this call.

        drop: tells the trainers of a failed engine, so that nobody waits for it. Raises
        EnginesLost by the place in `engines`, or a trainer's error.
        """
        answers, failed = dict[int, list[Any]](), dict[int, Exception]()
        calls = [*engines, *trainers]
        for index, outcome in as_completed(calls, self._patience, KNOB):
            if not isinstance(outcome, Exception):
                answers[index] = outcome
                continue
            failed[index] = outcome
            if index == len(engines) and not _blames_others(outcome):
                raise outcome
            if drop:
                drop(index, outcome)
            # Where all need each other, the others fail now too. A trainer may give up before Ray has noticed an
            # engine's death, or because an engine hangs: one that does not answer now hangs.
            if index == len(engines) or (self.options.kind == "broadcast" and trainers):
                failed |= self._settled(calls, len(engines), answers, failed)
                break
            if trainers and not drop:
                break
        if failed:
            raise _verdict(failed, len(engines))
        return [answers[index][0] for index in range(len(engines))], answers.get(len(engines), [])

    def _settled(
        self, calls: list[Pending[Any]], trainers: int, answers: Collection[int], failed: dict[int, Exception]
    ) -> dict[int, Exception]:
        """Return the further failures of a refit that has failed. Raises a trainer's error that blames no engine."""
        rest = [index for index in range(len(calls)) if index not in answers and index not in failed]
        found = dict[int, Exception]()
        for place, outcome in as_completed([calls[index] for index in rest], _SETTLE_S, KNOB):
            if isinstance(outcome, Exception):
                found[rest[place]] = outcome
        error = found.get(trainers)
        # A trainer without an answer hangs, unless an engine is gone: it may wait for that one.
        hangs = all(_is_intact(reason) for index, reason in (failed | found).items() if index != trainers)
        if error and not _blames_others(error) and (hangs or not isinstance(error, WorkerTimeout)):
            raise error
        return found


def ask_holdings(trainers: WorkerGroup, dtype: str, senders: Collection[int]) -> tuple[Layout, list[Holding]]:
    """Return the layout of all weights, and each rank's part, with the boxes of `senders`.

    Raises RefitError if ranks have different layouts.
    """
    asked = [(dtype, rank in senders) for rank in range(len(trainers))]
    holdings = trainers.run(SendsWeights.refit_holding, asked)
    (layout,) = trainers.workers[0].start(SendsWeights.refit_layout, dtype).wait(trainers.deadline_s)
    _require_one_layout(holdings)
    return layout, holdings


def make_plan(layout: Layout, holdings: list[Holding], options: RefitOptions) -> Planned:
    """Plan how ranks send what they hold."""
    # The ranks of one copy fill the links of any engine. More senders would be more members of a communicator.
    senders = options.ranks_a_copy or len(holdings)
    buffer_bytes = _buffer_bytes(layout, holdings[:senders], options)
    chunk_bytes, edge_bytes = buffer_bytes, _LEAST_BUFFER_BYTES
    if options.kind == "shm":
        longest_row = max(prod(shape[1:]) * ITEM_BYTES[dtype] for _, shape, dtype in layout)
        chunk_bytes = edge_bytes = max(_CACHED_BYTES, longest_row)
    elif options.colocated:
        edge_bytes = buffer_bytes
    boxes = [holding.boxes if rank < senders else [] for rank, holding in enumerate(holdings)]
    plan = RefitPlan.build(layout, boxes, chunk_bytes, edge_bytes)
    return Planned(plan, buffer_bytes, put_once(plan))


def _first_ranks(engines: list[EngineEnd]) -> list[int]:
    """Return the transport's rank of each engine's first worker; rank 0 is the trainer's."""
    return [*accumulate((engine.ranks for engine in engines), initial=1)][:-1]


def _require_one_layout(holdings: list[Holding]) -> None:
    """Raise RefitError for a rank that holds another model than rank 0."""
    for rank, holding in enumerate(holdings):
        if holding.layout_digest != holdings[0].layout_digest:
            raise RefitError(f"trainer rank {rank} has other tensors, shapes or dtypes than trainer rank 0")


def _buffer_bytes(layout: Layout, holdings: list[Holding], options: RefitOptions) -> int:
    smallest = min(holding.device_bytes for holding in holdings)
    # A receiver holds buffers of several owners at a time: no more memory than those of one would take.
    most = min(int(options.buffer_memory_ratio * smallest), MAX_BUFFER_BYTES) // min(REFIT_GROUPS, len(holdings))
    sent = sum(prod(shape) * ITEM_BYTES[dtype] for _, shape, dtype in layout)
    apart = min(sent, 4 * sent // len(holdings)) // _CHUNKS[options.kind]
    return min(most, max(sent // _CHUNKS_COLOCATED if options.colocated else apart, _LEAST_BUFFER_BYTES))


def _is_intact(reason: Exception) -> bool:
    kinds = (Untouched.__name__, Interrupted.__name__)
    return isinstance(reason, WorkerError) and reason.failures[0].type in kinds


def _blames_others(failure: Exception) -> bool:
    return isinstance(failure, WorkerError) and failure.failures[0].type == PeerLost.__name__


def _verdict(failed: dict[int, Exception], trainers: int) -> Exception:
    """Return the error of a failed refit: engines are to blame unless only the trainers (index `trainers`) failed."""
    lost = {index: reason for index, reason in failed.items() if index != trainers}
    for index, reason in lost.items():
        if isinstance(reason, WorkerTimeout) and trainers in failed:
            lost[index] = RefitError(f"{reason}: {failed[trainers]}")
    return EnginesLost(lost) if lost else failed[trainers]


def _merged_reports(engines: list[EngineReport], sent: list[SendReport]) -> RefitReport:
    """Return the slowest engine's report, with the trainers' packing time and the memory that both ends hold."""
    slowest = max(engines, key=lambda report: report.seconds)
    return RefitReport(
        seconds=slowest.seconds,
        bytes=slowest.received.bytes,
        pack=max(report.pack for report in sent),
        wire=slowest.received.wire,
        load=slowest.received.load,
        commit=slowest.commit,
        stall=max(report.stall for report in engines),
        gap=max(report.gap for report in engines),
        trainer_extra_bytes=max(report.extra_bytes for report in sent),
        engine_extra_bytes=max(report.received.extra_bytes for report in engines),
    )
