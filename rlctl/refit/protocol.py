"""Messages, reports and errors of a refit: plain data that trainer ranks, engines and the driver exchange."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlctl.telemetry.metrics import IN_GRPO, WEIGHT_UPDATES, Metric, ReportChart, rows_where

_UPDATE = ReportChart(WEIGHT_UPDATES, "Weight update")
_PARTS = ReportChart(WEIGHT_UPDATES, "Parts of the weight update")
# ruff must not split the rows of this table over more lines.
# fmt: off
REFIT_SECONDS = Metric("refit/seconds", "from the trainer's weights to live ones in the slowest engine", "seconds",
    chart=_UPDATE.with_place(10))
REFIT_STALL = Metric("refit/stall",
    "longest gap between two tokens of a running request beyond its ordinary gap, seconds", "seconds",
    chart=_UPDATE.with_place(14))
REFIT_REST = Metric("refit/rest", "seconds until a trainer that shares its devices with engines has given memory back",
    "seconds", chart=_UPDATE.with_place(11))
REFIT_WAKE = Metric("refit/wake", "seconds until engines that slept have their memory", "seconds",
    chart=_UPDATE.with_place(12))
METRICS = rows_where(
    IN_GRPO, REFIT_SECONDS, REFIT_STALL, REFIT_REST, REFIT_WAKE,
    Metric("refit/pause", "seconds in which an engine made weights live (commit) and could sample nothing", "seconds",
        chart=_UPDATE.with_place(13)),
    Metric("refit/pack", "seconds in which the slowest trainer rank converted and packed weights", "seconds",
        chart=_PARTS.with_place(20)),
    Metric("refit/wire", "seconds in which weights were on their way to the slowest engine; 0 through host memory",
        "seconds", chart=_PARTS.with_place(21)),
    Metric("refit/load",
        "seconds in which the slowest engine copied weights to their places; 0 where the wire does that", "seconds",
        chart=_PARTS.with_place(22)),
    Metric("refit/gb_per_s", "bytes delivered to each engine over refit/seconds, GB/s",
        chart=ReportChart(WEIGHT_UPDATES, "Bandwidth, GB/s", 30)),
)
# fmt: on
Checks = Literal["all", "sampled", "off"]
Kind = Literal["shm", "broadcast", "ipc"]
Mode = Literal["auto", "staged", "direct"]


@dataclass(frozen=True)
class Header:
    """Announcement of one refit to both ends."""

    version: int
    # Digest of the plan that the trainer uses.
    digest: str
    # Share of items whose checksums are compared: all, a sample, or none.
    checks: Checks
    # True if engines must prove that their live tensors are the sent ones (`LiveProof`); only with adapters.
    prove: bool = False


@dataclass(frozen=True)
class TransportSpec:
    """A transport, and how its two ends find each other."""

    kind: Kind
    # Number of engine workers; their ranks are 1 to `receivers`.
    receivers: int
    # Longest time that one end waits for the other.
    timeout_s: float
    # Number of buffers in the sender's ring, and in the receiver's.
    num_buffers: int = 2
    # Folder in host memory through which the ends of "shm" and "ipc" meet.
    folder: str = ""
    # Address of the store at which the ends of "broadcast" meet.
    host: str = ""
    port: int = 0
    # True if trainer rank 0 and the only receiver share a device.
    colocated: bool = False
    # Trainer rank that the plan calls rank 0: not 0 if each node has a separate refit.
    first_rank: int = 0

    @property
    def is_simultaneous(self) -> bool:
        """True if trainer ranks and engines must take part at the same time."""
        return self.kind != "shm"


@dataclass(frozen=True)
class SendReport:
    """One trainer rank's part of a refit; times in seconds."""

    # Converting and packing of chunks.
    pack: float
    # From the first packed chunk to the end of the last one's transfer; 0 if receivers fetch chunks themselves.
    wire: float
    # From the call until the weights may change again.
    seconds: float
    # Bytes that the rank sent.
    bytes: int
    # Bytes of the rank's buffers.
    extra_bytes: int
    # `digest_of` the sent checksums if the header asks for proofs; else 0.
    digest: int = 0


@dataclass(frozen=True)
class ReceiveReport:
    """One engine worker's part of a refit; times in seconds."""

    # Transfer of chunks from the trainers; 0 if the trainers write them to host memory.
    wire: float
    # Copying of arrived chunks to their places in the engine; 0 if the transfer itself does that.
    load: float
    # From the call until every item is in its place and checked.
    seconds: float
    # Bytes of all tensors.
    bytes: int
    # Bytes of the worker's buffers.
    extra_bytes: int


@dataclass(frozen=True)
class LiveProof:
    """Statement by one engine worker on the adapters that it serves: version, digest and number of tensors.

    The worker has compared the live tensors with the sent checksums.
    """

    version: int
    # `digest_of` the checksums that the live tensors were compared with.
    digest: int
    # Number of A tensors that were compared, and number of B tensors.
    a: int
    b: int


def digest_of(sums: Mapping[int, int]) -> int:
    """Return one number for the checksums of several items (item's number -> checksum).

    The digest of two disjoint sets of items together is the sum of their digests, modulo 2^64.
    """
    return sum((2 * number + 3) * checksum for number, checksum in sums.items()) % 2**64


@dataclass(frozen=True)
class EngineReport:
    """One engine's part of a refit; times in seconds."""

    # Report of the slowest worker.
    received: ReceiveReport
    # From the call until the weights are live.
    seconds: float
    # Time in which nothing could be sampled.
    commit: float
    # Longest gap between two tokens of a running request beyond its ordinary gap; 0 if none ran.
    stall: float
    # One proof of each worker if the header asks for proofs; else empty.
    proofs: tuple[LiveProof, ...] = ()
    # Ordinary gap between two tokens of a running request; 0 if none ran.
    gap: float = 0.0


@dataclass(frozen=True)
class RefitReport:
    """Result of one refit, over all trainer ranks and engines; times in seconds."""

    # From the first chunk to live weights in the slowest engine. If engines were lost: the seconds of the recovery.
    seconds: float
    # Bytes delivered to each engine; 0 if engines were lost.
    bytes: int = 0
    # Slowest trainer rank's converting and packing.
    pack: float = 0.0
    # `wire` and `load` of the slowest engine's `ReceiveReport`.
    wire: float = 0.0
    load: float = 0.0
    # Time in which the slowest engine could sample nothing.
    commit: float = 0.0
    # Longest gap between two tokens of any engine's running request beyond its ordinary gap, and the longest ordinary
    # gap of an engine; 0 if none ran.
    stall: float = 0.0
    gap: float = 0.0
    # Most bytes of buffers of any trainer rank, and of any engine worker.
    trainer_extra_bytes: int = 0
    engine_extra_bytes: int = 0
    # Slots of engines that were lost and rebuilt.
    rebuilt: tuple[int, ...] = ()
    # If engines share devices with the trainer: time until the trainer has freed its memory before the refit, and time
    # until the engines have allocated theirs, before and after the refit.
    rest: float = 0.0
    wake: float = 0.0


class RefitError(RuntimeError):
    """A failed refit. The message names the tensor or the rank at fault."""


class PeerLost(RefitError):
    """The other end did not answer in time, or is gone. The other end may be at fault, not the end that raises this."""


class Untouched(RefitError):
    """The refit failed before the engine's live weights were written: the engine still serves its old version."""


class RefitInterrupted(RefitError):
    """The refit lost a peer while it changed live weights. The engine samples again after a complete refit."""


@dataclass(frozen=True)
class LoadMode:
    """Chosen way in which an engine receives new weights."""

    mode: Literal["staged", "direct"]
    # Reason of the choice, for the user.
    why: str
    # Bytes of device memory for a second copy of the weights.
    extra_bytes: int
    # True if a refit writes every tensor except buffers, so that an engine may drop its old weights before a refit.
    overwrites: bool
