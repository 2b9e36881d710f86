"""The driver's part of a refit: connects trainer ranks and engines once, then sends each version with one call.

Every wait has a deadline. An error names the rank and tensor at fault. `EnginesLost` names the engines that did not get
the version. The pool then rebuilds these engines, or sends the version again.
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
    Kind,
    LiveProof,
    Mode,
    PeerLost,
    RefitError,
    RefitInterrupted,
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
# After timeout_s trainer ranks and engines give up by themselves. The driver waits this long for their reports.
_GRACE_S = 10.0
# After a failure the driver waits this long for the answers of the others.
_SETTLE_S = 10.0
# All weights are sent in about this many chunks, and one rank's share in at least a quarter of that number. A chunk is
# not smaller than _LEAST_BUFFER_BYTES, because starting it would take longer than sending it. While the first chunk is
# packed and the last one is loaded, nothing else runs, so these two are as small as possible. Starting a broadcast
# takes longer than starting a copy, so broadcasts have fewer chunks (Qwen3-8B in 48.7 ms instead of 49.4).
_CHUNKS = {"shm": 24, "ipc": 24, "broadcast": 12}
# Engines that copy directly from the trainer's memory need no packing. Few chunks mean few copies to start.
_CHUNKS_COLOCATED = 4
_LEAST_BUFFER_BYTES = 128 << 20
# Chunks in shared memory need no buffer. They are small, so that a chunk is still in the CPU's cache when its checksums
# are computed (copy and sum of 256 MiB: 33 ms in pieces of 8 MiB, 35 ms in pieces of 128 MiB).
_CACHED_BYTES = 8 << 20


@dataclass(frozen=True)
class EngineEnd:
    """One engine of a refit."""

    worker: Worker
    # Number of workers (tensor-parallel ranks) of the engine.
    ranks: int


@dataclass(frozen=True)
class RefitOptions:
    """Settings of every refit of a run."""

    kind: Kind
    # dtype in which every tensor is sent.
    dtype: str
    mode: Mode
    num_buffers: int
    # Share of a device's memory that the buffers of one end may take.
    buffer_memory_ratio: float
    timeout_s: float
    # Folder in host memory, see `TransportSpec`.
    folder: str
    checks: Checks
    # True if trainer rank 0 and the only engine worker share a device.
    colocated: bool
    # True if engines sample during a refit.
    in_flight: bool
    # True if only adapters are sent. Each engine then proves that they are live.
    adapters: bool = False
    # Number of first ranks that together hold one copy of all weights; 0: all ranks. Other ranks hold further copies,
    # and send nothing.
    ranks_a_copy: int = 0
    # Trainer rank that the plan calls rank 0.
    first_rank: int = 0


class EnginesLost(RuntimeError):
    """Engines that did not get the version, by index, with reasons. They are dead, poisoned or intact (`intact`)."""

    def __init__(self, reasons: dict[int, Exception]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(str(reason) for reason in reasons.values()))

    @property
    def intact(self) -> list[int]:
        """Indices of engines that must be sent the version again but need no new process: `Untouched` or
        `RefitInterrupted`."""
        return [index for index, reason in self.reasons.items() if _is_intact(reason)]


class Planned(NamedTuple):
    """Plan of all refits of a run."""

    plan: RefitPlan
    # Size of one buffer, bytes.
    buffer_bytes: int
    # The plan as one copy in Ray's store, which is passed to every rank and engine, also to rebuilt ones.
    shared: RefitPlan


class Refit:
    """Brings engines to the trainer's version."""

    def __init__(self, trainers: WorkerGroup, options: RefitOptions, planned: Planned | None = None) -> None:
        """Make the plan, or use `planned`, which `make_plan` has made."""
        self._trainers = trainers
        self.options = options
        if planned is None:
            senders = range(options.ranks_a_copy or len(trainers))
            layout, holdings = ask_holdings(trainers, options.dtype, senders)
            planned = make_plan(layout, holdings, options)
        self.plan = planned.plan
        self.buffer_bytes = planned.buffer_bytes
        self._shared_plan = planned.shared
        self._is_open = False
        # Version of the last adapters sent, and the digest of their checksums.
        self._sent_version = -1
        self._sent_digest = 0

    def open(self, engines: list[EngineEnd]) -> list[Any]:
        """Connect trainer ranks and engines; return each engine's `LoadMode`. Call it again for a rebuilt engine.

        Raises EnginesLost, or a trainer's error if no engine was the cause.
        """
        options = self.options
        spec = self.transport(sum(engine.ranks for engine in engines))
        trainer_calls = []
        if self._is_simultaneous or not self._is_open:
            trainer_calls.append(self._trainers.start(SendsWeights.refit_open, spec, self._shared_plan))
        engine_calls = []
        for engine, first_rank in zip(engines, _first_ranks(engines)):
            call = engine.worker.start(
                ReceivesWeights.refit_open, spec, self._shared_plan, first_rank, options.mode, options.in_flight
            )
            engine_calls.append(call)
        drop = self._make_drop(engines) if options.kind == "broadcast" else None
        modes, _ = self._await_answers(engine_calls, trainer_calls, drop)
        self._is_open = True
        return modes

    def run(self, engines: list[EngineEnd], version: int, checks: Checks | None = None) -> RefitReport:
        """Send `version` to all engines and make it live. checks: replaces the run's checks.

        Raises EnginesLost for engines that failed, and a trainer's error if no engine was the cause.
        """
        header = self._make_header(version, checks)
        begin = time.perf_counter()
        sending = self._trainers.start(SendsWeights.refit_send, header)
        if not self._is_simultaneous:
            sending.wait(self._patience_s, KNOB)
        write_seconds = time.perf_counter() - begin
        engine_calls = [engine.worker.start(ReceivesWeights.refit_receive, header) for engine in engines]
        engine_reports, send_reports = self._await_answers(engine_calls, [sending], self._make_drop(engines))
        if header.prove:
            self._sent_version = version
            self._sent_digest = sum(report.digest for report in send_reports) % 2**64
            self._verify_proofs(version, engines, engine_reports)
        report = _merge_reports(engine_reports, send_reports)
        # Engines that read from shared memory do not measure the time of writing there: add it.
        return report if self._is_simultaneous else replace(report, seconds=report.seconds + write_seconds)

    def resend(self, engines: list[EngineEnd], fresh: list[EngineEnd], behind: list[EngineEnd], version: int) -> None:
        """Bring rebuilt engines (`fresh`) and engines that missed the version (`behind`) to `version`.

        engines: all engines; the others have the version already. Raises EnginesLost with indices into `engines`, or a
        trainer's error.
        """
        if self._is_simultaneous:
            self.open(engines)
            self.run(engines, version, "all")
            return
        missing = [*fresh, *behind]
        try:
            self.open(fresh)
            self._receive_again(missing, version)
        except EnginesLost as error:
            reasons = {engines.index(missing[index]): reason for index, reason in error.reasons.items()}
            raise EnginesLost(reasons) from error

    def _receive_again(self, engines: list[EngineEnd], version: int) -> None:
        """Make engines read a version that is still in shared memory."""
        header = self._make_header(version)
        calls = [engine.worker.start(ReceivesWeights.refit_receive, header) for engine in engines]
        reports, _ = self._await_answers(calls)
        self._verify_proofs(version, engines, reports)

    def _make_header(self, version: int, checks: Checks | None = None) -> Header:
        return Header(version, self.plan.digest, checks or self.options.checks, prove=self.options.adapters)

    def _verify_proofs(self, version: int, engines: list[EngineEnd], reports: list[EngineReport]) -> None:
        """Raise EnginesLost for engines whose proofs differ from the adapters that the trainer sent."""
        if not self.options.adapters:
            return
        names = [entry.name for entry in self.plan.entries]
        num_a = sum(name.endswith(LORA_A) for name in names)
        num_b = sum(name.endswith(LORA_B) for name in names)
        sent = LiveProof(version=self._sent_version, digest=self._sent_digest, a=num_a, b=num_b)
        lost: dict[int, Exception] = {}
        for index, (engine, report) in enumerate(zip(engines, reports, strict=True)):
            proofs = set(report.proofs)
            if len(report.proofs) == engine.ranks and proofs == {sent} and sent.version == version:
                continue
            live = []
            for proof in sorted(proofs, key=lambda proof: (proof.version, proof.digest, proof.a, proof.b)):
                live.append(f"version {proof.version} with {proof.a} A and {proof.b} B")
            differs = ", whose checksums differ" if {proof.version for proof in proofs} == {version} else ""
            lost[index] = RefitError(
                f"{engine.worker.name} does not serve the adapters of version {version} with {num_a} A and {num_b} B "
                f"that the trainer sent: it proves {'; '.join(live) or 'nothing'}{differs}"
            )
        if lost:
            raise EnginesLost(lost)

    def catch_up(self, behind: list[EngineEnd], version: int) -> None:
        """Bring only the engines `behind` to `version`, while lost engines are being rebuilt. Raises like `run`."""
        if self._is_simultaneous:
            self.open(behind)
            self.run(behind, version, "all")
            return
        self._receive_again(behind, version)

    def rest_trainers(self) -> None:
        """Make the trainers free their device memory for the engines that share their devices."""
        self._trainers.call(SendsWeights.rest)

    @property
    def _patience_s(self) -> float:
        return self.options.timeout_s + _GRACE_S

    @property
    def _is_simultaneous(self) -> bool:
        """True if trainer ranks and engines must take part at the same time, for any number of engines."""
        return self.transport(0).is_simultaneous

    def transport(self, receivers: int) -> TransportSpec:
        """Return the transport for a refit to this number of engine workers."""
        options = self.options
        spec = TransportSpec(
            kind=options.kind,
            receivers=receivers,
            timeout_s=options.timeout_s,
            num_buffers=options.num_buffers,
            folder=options.folder,
            colocated=options.colocated,
            first_rank=options.first_rank,
        )
        if options.kind == "broadcast" and receivers:
            # Rank 0 runs the store at which all members meet.
            host, port = self._trainers.workers[0].meeting_point()
            return replace(spec, host=host, port=port)
        return spec

    def _make_drop(self, engines: list[EngineEnd]) -> Callable[[int, Exception], None]:
        """Return a function that tells the trainers about a failed engine. They tell the other engines."""
        first_ranks = _first_ranks(engines)

        def drop(index: int, reason: Exception) -> None:
            ranks: list[int] = []
            if index < len(engines):
                ranks = list(range(first_ranks[index], first_ranks[index] + engines[index].ranks))
            self._trainers.call_at_once(SendsWeights.refit_drop, ranks, str(reason))

        return drop

    def _await_answers(
        self,
        engine_calls: list[Pending[R]],
        trainer_calls: Sequence[Pending[Any]] = (),
        drop: Callable[[int, Exception], None] | None = None,
    ) -> tuple[list[R], list[Any]]:
        """Return the engines' answers and the trainers' answers.

        trainer_calls: at most one call of all trainers, if they take part. drop: tells the trainers about a failed
        engine, so that nobody waits for that engine. Raises EnginesLost with indices into `engine_calls`, or a
        trainer's error.
        """
        answers: dict[int, list[Any]] = {}
        failures: dict[int, Exception] = {}
        calls = [*engine_calls, *trainer_calls]
        trainers_index = len(engine_calls)
        for index, outcome in as_completed(calls, self._patience_s, KNOB):
            if not isinstance(outcome, Exception):
                answers[index] = outcome
                continue
            failures[index] = outcome
            if index == trainers_index and not _blames_others(outcome):
                raise outcome
            if drop:
                drop(index, outcome)
            # Wait for the other failures, to find the cause. In a broadcast the failure of one member makes the others
            # fail too. A trainer may give up before Ray has noticed an engine's death, or because an engine hangs.
            if index == trainers_index or (self.options.kind == "broadcast" and trainer_calls):
                failures |= self._await_failures(calls, trainers_index, answers, failures)
                break
            # Without `drop` nobody tells the others, who may wait until their own deadline: do not wait for them.
            if trainer_calls and not drop:
                break
        if failures:
            raise _make_verdict(failures, trainers_index)
        return [answers[index][0] for index in range(len(engine_calls))], answers.get(trainers_index, [])

    def _await_failures(
        self,
        calls: list[Pending[Any]],
        trainers_index: int,
        answers: Collection[int],
        failures: dict[int, Exception],
    ) -> dict[int, Exception]:
        """Wait for the other calls of a failed refit; return their failures. Raises a trainer's error that blames no
        engine."""
        pending = [index for index in range(len(calls)) if index not in answers and index not in failures]
        further_failures: dict[int, Exception] = {}
        for number, outcome in as_completed([calls[index] for index in pending], _SETTLE_S, KNOB):
            if isinstance(outcome, Exception):
                further_failures[pending[number]] = outcome
        error = further_failures.get(trainers_index)
        if error is None or _blames_others(error):
            return further_failures
        # A trainer without an answer hangs, unless an engine is gone: the trainer may wait for that engine.
        all_failures = failures | further_failures
        is_engine_gone = any(
            index != trainers_index and not _is_intact(reason) for index, reason in all_failures.items()
        )
        if not (isinstance(error, WorkerTimeout) and is_engine_gone):
            raise error
        return further_failures


def ask_holdings(trainers: WorkerGroup, dtype: str, senders: Collection[int]) -> tuple[Layout, list[Holding]]:
    """Return the layout of all weights, and each rank's `Holding`. Only holdings of `senders` contain boxes.

    Raises RefitError if ranks have different layouts.
    """
    arguments = [(dtype, rank in senders) for rank in range(len(trainers))]
    holdings = trainers.run(SendsWeights.refit_holding, arguments)
    (layout,) = trainers.workers[0].start(SendsWeights.refit_layout, dtype).wait(trainers.deadline_s)
    _require_one_layout(holdings)
    return layout, holdings


def make_plan(layout: Layout, holdings: list[Holding], options: RefitOptions) -> Planned:
    """Return the plan by which ranks send their weights."""
    # Only the ranks of one copy of the weights send, because they saturate the links of any engine. More senders would
    # only make communicators larger.
    senders = options.ranks_a_copy or len(holdings)
    buffer_bytes = _choose_buffer_bytes(layout, holdings[:senders], options)
    chunk_bytes = buffer_bytes
    edge_bytes = _LEAST_BUFFER_BYTES
    if options.kind == "shm":
        longest_row = max(prod(shape[1:]) * ITEM_BYTES[dtype] for _, shape, dtype in layout)
        chunk_bytes = max(_CACHED_BYTES, longest_row)
        edge_bytes = chunk_bytes
    elif options.colocated:
        edge_bytes = buffer_bytes
    boxes = [holding.boxes if rank < senders else [] for rank, holding in enumerate(holdings)]
    plan = RefitPlan.build(layout, boxes, chunk_bytes, edge_bytes)
    return Planned(plan, buffer_bytes, put_once(plan))


def _first_ranks(engines: list[EngineEnd]) -> list[int]:
    """Return the transport's rank of each engine's first worker. Ranks of engine workers begin at 1."""
    return [*accumulate((engine.ranks for engine in engines), initial=1)][:-1]


def _require_one_layout(holdings: list[Holding]) -> None:
    """Raise RefitError for a rank whose layout differs from rank 0's."""
    for rank, holding in enumerate(holdings):
        if holding.layout_digest != holdings[0].layout_digest:
            raise RefitError(f"trainer rank {rank} has other tensors, shapes or dtypes than trainer rank 0")


def _choose_buffer_bytes(layout: Layout, holdings: list[Holding], options: RefitOptions) -> int:
    """Return the size of one buffer. holdings: those of the ranks that send."""
    smallest_device = min(holding.device_bytes for holding in holdings)
    limit = min(int(options.buffer_memory_ratio * smallest_device), MAX_BUFFER_BYTES)
    # A receiver has buffers for several groups of owners. All buffers together must not exceed the limit.
    limit //= min(REFIT_GROUPS, len(holdings))
    sent_bytes = sum(prod(shape) * ITEM_BYTES[dtype] for _, shape, dtype in layout)
    if options.colocated:
        chunk_bytes = sent_bytes // _CHUNKS_COLOCATED
    else:
        chunk_bytes = min(sent_bytes, 4 * sent_bytes // len(holdings)) // _CHUNKS[options.kind]
    return min(limit, max(chunk_bytes, _LEAST_BUFFER_BYTES))


def _is_intact(reason: Exception) -> bool:
    kinds = (Untouched.__name__, RefitInterrupted.__name__)
    return isinstance(reason, WorkerError) and reason.failures[0].type in kinds


def _blames_others(failure: Exception) -> bool:
    return isinstance(failure, WorkerError) and failure.failures[0].type == PeerLost.__name__


def _make_verdict(failures: dict[int, Exception], trainers_index: int) -> Exception:
    """Return the error of a failed refit: EnginesLost, or the trainers' error if no engine failed."""
    lost = {index: reason for index, reason in failures.items() if index != trainers_index}
    for index, reason in lost.items():
        if isinstance(reason, WorkerTimeout) and trainers_index in failures:
            # The engine hangs. The trainers' error says for which part of the refit they waited.
            lost[index] = RefitError(f"{reason}: {failures[trainers_index]}")
    return EnginesLost(lost) if lost else failures[trainers_index]


def _merge_reports(engine_reports: list[EngineReport], send_reports: list[SendReport]) -> RefitReport:
    """Return the slowest engine's report, with the trainers' packing time and the buffer memory of both ends."""
    slowest = max(engine_reports, key=lambda report: report.seconds)
    return RefitReport(
        seconds=slowest.seconds,
        bytes=slowest.received.bytes,
        pack=max(report.pack for report in send_reports),
        wire=slowest.received.wire,
        load=slowest.received.load,
        commit=slowest.commit,
        stall=max(report.stall for report in engine_reports),
        gap=max(report.gap for report in engine_reports),
        trainer_extra_bytes=max(report.extra_bytes for report in send_reports),
        engine_extra_bytes=max(report.received.extra_bytes for report in engine_reports),
    )
