"""Messages and reports of the two ends of a refit, and how one fails: plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlctl.telemetry.metrics import IN_GRPO, WEIGHT_UPDATES, Metric, ReportChart, rows_where

_UPDATE = ReportChart(WEIGHT_UPDATES, "Weight update")
_PARTS = ReportChart(WEIGHT_UPDATES, "Parts of the weight update")
# A table: each row fills its lines.
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
    # Digest of the plan by which the trainer sends.
    digest: str
    # Items whose checksums are compared.
    checks: Checks
    # Engines prove that their live tensors are the sent ones, see `LiveProof`. Adapters alone.
    prove: bool = False


@dataclass(frozen=True)
class TransportSpec:
    """A transport, and how its two ends find each other."""

    kind: Kind
    # Number of engine workers; their ranks are 1 to `receivers`.
    receivers: int
    # Longest that one end waits for another.
    timeout_s: float
    # Buffers of the sender's ring, and of the receiver's.
    num_buffers: int = 2
    # In the host's memory: meeting place of shm and ipc.
    folder: str = ""
    # Rendezvous of broadcast.
    host: str = ""
    port: int = 0
    # Trainer rank 0 and the one receiver share their device.
    colocated: bool = False
    # Trainer rank that the plan counts as 0: the first of its node, where each node has a refit.
    first_rank: int = 0

    @property
    def rendezvous(self) -> bool:
        """True if sender and receivers must run at the same time."""
        return self.kind != "shm"


@dataclass(frozen=True)
class SendReport:
    """One trainer rank's part of a refit; times in seconds."""

    # Converting and packing of chunks.
    pack: float
    # From the first packed chunk to the last one on the wire; 0 where receivers fetch chunks themselves.
    wire: float
    # Seconds until the weights may change again.
    seconds: float
    # Bytes that the rank sent.
    bytes: int
    # Memory of its buffers.
    extra_bytes: int
    # Where engines prove what they serve: `digest_of` the checksums.
    digest: int = 0


@dataclass(frozen=True)
class ReceiveReport:
    """One engine worker's part of a refit; times in seconds."""

    # Chunks on their way from the trainers; 0 where they lie in the host's memory.
    wire: float
    # Copying of arrived chunks to where the engine keeps them; 0 where the wire does that.
    load: float
    # Seconds until every item is in its place and checked.
    seconds: float
    # Bytes of all tensors.
    bytes: int
    # Memory of its buffers.
    extra_bytes: int


@dataclass(frozen=True)
class LiveProof:
    """Adapters that an engine serves, as their live tensors' checksums prove."""

    version: int
    # `digest_of` the checksums that the live tensors were compared with.
    digest: int
    # Tensors.
    a: int
    b: int


def digest_of(sums: Mapping[int, int]) -> int:
    """Return one number for the checksums of items. Digests of disjoint items add up, modulo 2^64."""
    return sum((2 * number + 3) * checksum for number, checksum in sums.items()) % 2**64


@dataclass(frozen=True)
class EngineReport:
    """One engine's part of a refit; times in seconds."""

    # Report of the slowest worker.
    received: ReceiveReport
    # From the call to live weights.
    seconds: float
    # Seconds in which nothing could be sampled.
    commit: float
    # Longest gap between two tokens of a running request beyond its ordinary gap; 0 if none ran.
    stall: float
    # One of each worker with adapters.
    proofs: tuple[LiveProof, ...] = ()
    # Ordinary gap between two tokens of a running request; 0 if none ran.
    gap: float = 0.0


@dataclass(frozen=True)
class RefitReport:
    """Result of one refit, over all trainer ranks and engines; times in seconds."""

    # From the first chunk to live weights in the slowest engine; the recovery's where engines were rebuilt or repeated.
    seconds: float
    # Bytes delivered to each engine; 0 if engines had to be brought to the version a second time.
    bytes: int = 0
    # Slowest trainer rank's converting and packing.
    pack: float = 0.0
    # Slowest engine's wire and loading, see `ReceiveReport`.
    wire: float = 0.0
    load: float = 0.0
    # Seconds in which the slowest engine could sample nothing.
    commit: float = 0.0
    # Longest gap between two tokens of any engine's running request beyond its ordinary gap, and the longest ordinary
    # gap of an engine; 0 if none ran.
    stall: float = 0.0
    gap: float = 0.0
    # Memory that a trainer rank and an engine worker hold for refits at most.
    trainer_extra_bytes: int = 0
    engine_extra_bytes: int = 0
    # Slots of engines that were lost and rebuilt.
    rebuilt: tuple[int, ...] = ()
    # Where engines and trainer take turns on devices: seconds until the trainer released its memory before the refit,
    # and until the engines have theirs, before and after it.
    rest: float = 0.0
    wake: float = 0.0


class RefitError(RuntimeError):
    """A refit that must not be trusted: the message names the tensor or the rank at fault."""


class PeerLost(RefitError):
    """The other end did not answer in time, or is gone: it may be at fault, not who says so."""


class Untouched(RefitError):
    """A refit that failed before the engine's live weights were touched: it still serves its old version."""


class RefitInterrupted(RefitError):
    """A refit that lost a peer when live weights were touched: the engine waits for the version, and samples then."""


@dataclass(frozen=True)
class LoadMode:
    """Choice of the way in which an engine takes new weights in."""

    mode: Literal["staged", "direct"]
    # Reason of the choice, for a reader.
    why: str
    # Bytes of device memory for a second copy of the weights.
    extra_bytes: int
    # A refit writes every tensor but buffers, so that nothing of the version before it has to be kept.
    overwrites: bool
