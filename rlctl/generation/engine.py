"""The port of an engine: a process that samples turns from the policy and takes new weights in.

vLLM (`generation/vllm/`) is the first implementation. A second one is a class with these methods and an `EngineKind`
(`generation/spec.py`) that builds it: `generation.engine=my_engine.py:KIND` chooses it. Nothing above this module knows
which engine runs.

An engine is hosted by a `WorkerActor`. Its methods are called from several threads, six at a time, and the driver waits
for each answer with a deadline. It replaces an engine whose process ends, that misses a deadline, that raises from
`submit`, `collect` or `abort`, or that fails a refit otherwise than by `Untouched`. Turns of a replaced engine begin
again elsewhere. An error that a new engine raises too, before any token, ends the run, and so does an error of `sleep`
or `wake`.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from rlctl.generation.requests import PackedCompletions, RequestId, TurnRequest
from rlctl.refit.plan import RefitPlan
from rlctl.refit.protocol import EngineReport, Header, Mode, TransportSpec

# Device memory that an engine gives back when it sleeps, and takes again part by part.
MemoryPart = Literal["weights", "kv_cache"]
# Seconds for which answers gather, to leave together, while others run: a call costs the driver about 1 ms, and takes
# time of the engine's process, in which its steps stand still.
GATHER_S = 0.02
# Number of such rounds while enough requests wait in the engine: no step lacks any then.
GATHER_ROUNDS = 10
GATHER_MOST_S = GATHER_ROUNDS * GATHER_S
# Answers, or requests, that gather at most.
ENOUGH = 32


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine's start."""

    # Seconds spent in steps.
    busy: float = 0.0
    # Seconds in which weights changed and nothing could be sampled.
    paused: float = 0.0
    # Sampled tokens: one a step for each sequence in it.
    tokens: int = 0
    steps: int = 0
    # Prompt tokens of requests that began, and the part found in the prefix cache.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    # Capacity: sequences of the longest kind that the key-value cache holds; 0 where that is unknown.
    holds: int = 0
    # Time of reading, seconds of the engine's own clock.
    at: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class FinishedTurns:
    """Answers that an engine hands out together."""

    ids: list[RequestId]
    # A row each of `ids`.
    columns: PackedCompletions
    stats: EngineStats


@dataclass(frozen=True)
class LoadMode:
    """Choice of the way in which an engine takes new weights in."""

    mode: Literal["staged", "direct"]
    # Reason of the choice, for a reader.
    why: str
    # Device memory held by the cache, bytes.
    extra_bytes: int
    # A refit writes every tensor but buffers, so that nothing of the version before it has to be kept.
    overwrites: bool


class Engine(Protocol):
    """An engine as the driver sees it."""

    def submit(self, requests: list[TurnRequest]) -> None:
        """Begin to sample; `collect` hands out each answer. Return at once.

        A turn is a function of its seed and of the weights alone; other requests do not change it. Requests submitted
        together begin in their order. Raises ValueError for a prompt too long for the model and for a request already
        in flight; nothing of the call has begun then. Raises RuntimeError if the live weights must not be used.
        """

    def collect(self, patience_s: float) -> FinishedTurns:
        """Return the answers that ended since the last call, each once; wait at most `patience_s` for the first.

        Each token has its log-prob under the distribution it was drawn from, and the version of the weights in use:
        versions of a turn never fall. Raises the error that ended requests otherwise than by their last token or by
        `abort`.
        """

    def abort(self, ids: list[RequestId]) -> int:
        """Stop sampling these requests; return how many tokens they had. None is handed out afterwards.

        Requests that the engine does not have are passed over.
        """

    def refit_open(
        self, spec: TransportSpec, plan: RefitPlan, first_rank: int, mode: Mode, in_flight: bool
    ) -> LoadMode:
        """Join the refit transport as ranks `first_rank` and following; leave the one before.

        in_flight: requests go on during a refit. Raises RefitError for a plan or mode that the engine cannot serve.
        """

    def refit_receive(self, header: Header) -> EngineReport:
        """Make a version live between two steps. Requests continue under the new version, their keys and values kept or
        recomputed.

        The engine serves the old version or the new one, never a mixture. A failure leaves the engine unusable (every
        later `submit` raises), unless it is `Untouched`: the old version is live then.
        """

    def sleep(self) -> None:
        """Give the device's memory to the trainer. Called only while no request runs."""

    def wake(self, part: MemoryPart) -> None:
        """Take memory back: "weights" before a refit, "kv_cache" before generation."""

    def memory(self) -> dict[str, float]:
        """Return bytes: device_allocated and device_peak, summed over the engine's devices, and host_rss."""

    def checksums(self) -> dict[str, int]:
        """Return a checksum of each tensor that answers depend on, by the engine's own names; none if it cannot tell.

        Equal weights have equal checksums, whether they were loaded or came by a refit.
        """
        return {}

    def notes(self) -> list[str]:
        """Return sentences about this engine for a person to read once, such as a shortcut that is off."""
