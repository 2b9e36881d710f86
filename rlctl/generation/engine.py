"""The port of an engine: a process that samples turns from the policy and takes new weights in.

vLLM (`generation/vllm/`) is the first implementation. A second one is a class with these methods and an `EngineKind`
(`generation/spec.py`) that builds it: `generation.engine=my_engine.py:KIND` chooses it. Nothing above this module knows
which engine runs.

An engine is hosted by a `WorkerActor`. The driver calls its methods by name, and waits for each answer with a deadline.
`tests/system/test_engine_port.py` holds engines to the promises below.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from rlctl.generation.requests import PackedCompletions, RequestId, TurnRequest

# An engine of a user imports `LoadMode` from here.
from rlctl.refit.protocol import LoadMode as LoadMode
from rlctl.refit.refit_plan import ReceivesWeights

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
    """Totals since the engine's start. An engine with requests whose totals stay equal is taken for hung."""

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


class Engine(ReceivesWeights, Protocol):
    """An engine as the driver sees it. Once it is built it can sample.

    **Calls.** Four kinds come side by side, on threads of their own: `collect`; `submit` and `abort`; the refit,
    `sleep` and `wake`; `memory`. Within a kind a call comes after the answer to the one before. `collect` and `memory`
    come also while weights change, and in sleep; `submit` and `abort` also while weights change, if the refit is in
    flight.

    **Answers.** The distribution of a token is the softmax of logits over the temperature, cut by `top_k` and `top_p`
    of `EngineSpec`. Requests of the purpose parity and greedy ones have no cut; log-probs of greedy tokens are those of
    temperature 1. An answer ends by one of `EngineSpec.stop_token_ids` or `TurnRequest.stops`, which stays in it, and
    its finish is "stop". Else it ends at `max_new_tokens`, or where prompt and answer have `EngineSpec.max_model_len`
    tokens, and its finish is "length". An engine that lacks any of these, or `forced_lengths`, raises when it is built.

    **Order.** Answers come in any order. A request is in flight from `submit` until `collect` hands it out or `abort`
    returns. Its id may come again afterwards.

    **Versions.** The first version is `EngineSpec.version`; for -1 a refit comes before any request. Each token has the
    version whose weights computed its log-prob. A turn that begins after a refit uses no keys of earlier weights,
    unless `EngineSpec.reset_prefix_cache` is false.

    **Failure.** An engine need not recover. The driver ends and rebuilds one whose `submit`, `collect` or `abort`
    raises. It does the same after `run.deadline_s` without an answer, or with equal `EngineStats` while requests are in
    flight. The new one samples these requests from their first token. An error of a refit does the same, but
    for `Untouched` and `RefitInterrupted`. An error of `sleep` or `wake` ends the run. So does one that two engines
    raise before any token of `EngineStats`.

    **Memory.** An engine on the trainer's devices (`EngineSpec.sleeps`) sleeps while these train. The order is `sleep`,
    `wake("weights")`, `refit_receive`, `wake("kv_cache")`, so that weights and cache may be dropped.
    """

    def submit(self, requests: list[TurnRequest]) -> None:
        """Begin to sample; `collect` hands out each answer. Return at once.

        A turn is a function of its seed and of the weights alone; other requests do not change it. Requests submitted
        together begin in their order. Raises ValueError for a prompt too long for the model and for a request already
        in flight; nothing of the call has begun then. Raises RuntimeError if the live weights must not be used.
        """

    def collect(self, patience_s: float) -> FinishedTurns:
        """Return the answers that ended since the last call, each once; wait at most `patience_s` for the first.

        Further ones may gather for `GATHER_MOST_S`. Each token has its log-prob under the distribution it was drawn
        from, and its version: versions of a turn never fall. Raises the error that ended requests otherwise than by
        their last token or by `abort`; they are in flight no more.
        """

    def abort(self, ids: list[RequestId]) -> int:
        """Stop sampling these requests, and forget those that have ended; return how many tokens they had.

        None is handed out afterwards. Requests that the engine does not have are passed over.
        """

    def sleep(self) -> None:
        """Give the device's memory to the trainer. No request is in flight."""

    def wake(self, part: MemoryPart) -> None:
        """Take memory back: "weights" before a refit, "kv_cache" before generation."""

    def memory(self) -> dict[str, float]:
        """Return bytes: device_allocated and device_peak, summed over the engine's devices, and host_rss."""

    def checksums(self) -> dict[str, int]:
        """Return a checksum of each tensor that answers depend on, by the engine's own names; none if it cannot tell.

        Equal weights have equal checksums, whether they were loaded or came by a refit. A word in brackets ends a name
        if a refit may leave the tensor as it is.
        """
        return {}

    def notes(self) -> list[str]:
        """Return sentences about this engine for a person to read once, such as a shortcut that is off."""
