"""What the two ends of a refit tell each other, and how one fails: plain data."""

from dataclasses import dataclass
from typing import Literal

Checks = Literal["all", "sampled", "off"]
# Where new weights arrive: beside the live ones, or in their place.
Mode = Literal["auto", "staged", "direct"]
Kind = Literal["shm", "broadcast", "ipc"]


@dataclass(frozen=True)
class Header:
    """What both ends are told before a refit: the version, the plan's digest, which items have checksums compared."""

    version: int
    digest: str
    checks: Checks


@dataclass(frozen=True)
class TransportSpec:
    """Which transport, and how its two ends find each other.

    folder: where shm and ipc meet, in the host's memory. host, port: broadcast's rendezvous. receivers: engine
    workers in all, ranks 1 to `receivers`. timeout_s: the longest that an end waits for another. num_buffers: of
    the sender's ring, and of the receiver's. colocated: trainer rank 0 and the one receiver share their device.
    """

    kind: Kind
    receivers: int
    timeout_s: float
    num_buffers: int = 2
    folder: str = ""
    host: str = ""
    port: int = 0
    colocated: bool = False

    @property
    def rendezvous(self) -> bool:
        """True if sender and receivers must run at the same time."""
        return self.kind != "shm"


@dataclass(frozen=True)
class RefitReport:
    """Result of one refit, over all engines."""

    # From the first chunk to live weights in the slowest engine; with `rebuilt` or repeated engines, of the recovery.
    seconds: float
    # Bytes delivered to each engine; 0 if engines had to be brought to the version a second time.
    bytes: float = 0.0
    # Seconds of the slowest trainer rank's converting and packing.
    pack: float = 0.0
    # Seconds between the first and the last chunk on the wire, in the slowest engine.
    wire: float = 0.0
    # Seconds of loading chunks into place, in the slowest engine.
    load: float = 0.0
    # Seconds in which the slowest engine could sample nothing.
    commit: float = 0.0
    # Longest gap between two tokens of a running request beyond its ordinary gap, in seconds; 0 if none ran.
    stall: float = 0.0
    # Memory that a trainer rank and an engine worker hold for refits at most.
    trainer_extra_bytes: float = 0.0
    engine_extra_bytes: float = 0.0
    # Slots of engines that were lost and rebuilt.
    rebuilt: tuple[int, ...] = ()


class RefitError(RuntimeError):
    """A refit that must not be trusted: the message names the tensor or the rank at fault."""


class PeerLost(RefitError):
    """The other end did not answer in time, or is gone: it may be at fault, not who says so."""


class Untouched(RefitError):
    """A refit that failed before the engine's live weights were touched: it still serves its old version."""
