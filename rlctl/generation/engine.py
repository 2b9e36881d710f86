"""Interface `Engine`: an object in a separate process that samples turns or scores tokens, and receives new weights.

vLLM (`generation/vllm/`) is the first implementation. Another engine is a class with these methods, and an `EngineKind`
(`generation/spec.py`) that builds an object of the class. `generation.engine=my_engine.py:KIND` chooses it. No other
folder depends on the kind of engine.

The process of an engine is a `WorkerActor`. The driver calls the engine's methods by name, and waits for each answer
with a deadline. `tests/system/test_engine_port.py` tests the promises of the docstrings below.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from rlctl.generation.requests import PackedCompletions, RequestId, ScoreRequest, TurnRequest

# An engine of a user imports `LoadMode` from here.
from rlctl.refit.protocol import LoadMode as LoadMode
from rlctl.refit.refit_plan import ReceivesWeights

# Part of an engine's device memory. `sleep` frees both parts, `wake` allocates one part again.
MemoryPart = Literal["weights", "kv_cache"]
# `collect` waits this long for further answers, so that one call returns several. A call costs the driver about 1 ms,
# and delays the engine's steps.
GATHER_S = 0.02
# The most such waits in a row. A further wait needs enough requests in the engine to keep its steps full.
GATHER_ROUNDS = 10
GATHER_MOST_S = GATHER_ROUNDS * GATHER_S
# A call with this number of answers (`collect`) or of requests (`submit`) waits for no more.
ENOUGH = 32


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine's start. An engine counts as hung if they stay equal while requests are in flight."""

    # Seconds spent in steps.
    busy: float = 0.0
    # Seconds in which nothing could be sampled because weights changed.
    paused: float = 0.0
    # Number of sampled tokens: a step samples one token for each of its sequences. A scored sequence counts once.
    tokens: int = 0
    steps: int = 0
    # Number of prompt tokens of requests that began, and number of prompt tokens that were in the prefix cache.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    # Number of sequences of `max_model_len` tokens for which the key-value cache has room; 0 if unknown.
    holds: int = 0
    # Time at which the totals were read, by the clock of the engine's process, in seconds.
    at: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class FinishedTurns:
    """Answers that one `collect` returns."""

    ids: list[RequestId]
    # One completion for each of `ids`, in the same order.
    columns: PackedCompletions
    stats: EngineStats


class Engine(ReceivesWeights, Protocol):
    """Methods of an engine that the driver calls. A built engine can sample.

    **Calls.** Methods of four kinds are called concurrently, each kind on another thread: `collect`; `submit`, `score`
    and `abort`; the refit, `sleep` and `wake`; `memory`. Within a kind, the next call comes after the answer to the
    previous one. `collect` and `memory` are also called while weights change, and during sleep. `submit`, `score` and
    `abort` are also called while weights change, if the refit is in flight.

    **Answers.** The distribution of a token is the softmax of logits divided by the temperature, truncated by `top_k`
    and `top_p` of `EngineSpec`. Greedy requests and requests of purpose "parity" are not truncated. Log-probs of greedy
    tokens are those of temperature 1. An answer ends with one of `EngineSpec.stop_token_ids` or `TurnRequest.stops`,
    keeps this token, and has the finish "stop". Otherwise it ends at `max_new_tokens`, or when prompt and answer have
    `EngineSpec.max_model_len` tokens, and has the finish "length". An engine that does not support any of these,
    `forced_lengths`, `EngineSpec.scores` or `EngineSpec.values`, raises when it is built.

    **Scores.** The answer to a `ScoreRequest` has the scored tokens and their log-probs, all of one weight version.
    With `top` or `ids` it has two further columns: `top_ids` [n, k], int32, likeliest first or as given, and
    `top_log_probs` [n, k], float32. Distributions are the softmax of logits divided by the request's temperature, never
    truncated. Scores are exact: cached keys of other weights change none, and a cached prefix leaves out none. The
    finish is "length".

    **Values.** With `EngineSpec.values` the model has a value head, and a `ScoreRequest` scores its last token alone.
    The answer's column `value` [1], float32, is the head's output at that token: no activation, no temperature.
    Log-probs are 0.

    **Order.** Answers come in any order. A request is in flight from `submit` until `collect` returns its answer or
    `abort` returns. Its id may be submitted again afterwards.

    **Versions.** The first version is `EngineSpec.version`; if it is -1, a refit comes before any request. Each token
    has the version whose weights computed its log-prob. A turn that begins after a refit uses no cached keys and values
    of earlier weights, unless `EngineSpec.reset_prefix_cache` is false.

    **Failure.** An engine need not recover. The driver ends and rebuilds an engine if `submit`, `collect` or `abort`
    raises, if a call has no answer within `run.deadline_s`, or if `EngineStats` stay equal for that long while requests
    are in flight. The new engine samples these requests from their first token. The driver also rebuilds an engine
    whose refit raises any error except `Untouched` and `RefitInterrupted`. An error of `sleep` or `wake` ends the run.
    The same error from two engines ends the run too, if neither has sampled a token (`EngineStats.tokens`).

    **Memory.** An engine on the trainer's devices (`EngineSpec.sleeps`) sleeps while the trainer uses them. The order
    of calls is `sleep`, `wake("weights")`, `refit_receive`, `wake("kv_cache")`, so `sleep` may drop weights and cache.
    """

    def submit(self, requests: list[TurnRequest]) -> None:
        """Begin to sample requests, and return at once; `collect` returns the answers.

        A turn's tokens depend only on its request and the weights, not on other requests. Requests submitted together
        begin in their order. Raises ValueError for a prompt that is too long for the model and for a request already in
        flight; then no request of the call has begun. Raises RuntimeError if the live weights must not be used.
        """

    def score(self, requests: list[ScoreRequest]) -> None:
        """Begin to score given tokens, and return at once; `collect` returns the answers.

        Called only if `EngineSpec.scores` or `EngineSpec.values`, or after `open_scores`. Scores depend only on the
        request and the weights. Raises as `submit` does, and ValueError for a malformed request.
        """
        raise NotImplementedError(f"{type(self).__name__} scores no tokens")

    def open_scores(self) -> str:
        """Return why an engine that was built without `EngineSpec.scores` scores no tokens; empty if it scores a few.

        The probe compares the scores of its sampled tokens.
        """
        return f"{type(self).__name__} scores no tokens"

    def collect(self, patience_s: float) -> FinishedTurns:
        """Return the answers that ended since the last call; wait at most `patience_s` seconds for the first one.

        After the first answer, the call may wait up to `GATHER_MOST_S` for others. Each token has its log-prob under
        the distribution that it was drawn from, and its version; versions within a turn never decrease. If an error
        ended requests, raises this error; those requests are no longer in flight.
        """

    def abort(self, ids: list[RequestId]) -> int:
        """Stop these requests, and drop their finished answers; return their number of sampled tokens.

        `collect` does not return their answers afterwards. Requests that the engine does not have are ignored.
        """

    def sleep(self) -> None:
        """Free the device's memory for the trainer. Called only while no request is in flight."""

    def wake(self, part: MemoryPart) -> None:
        """Allocate a part of the memory again: "weights" before a refit, "kv_cache" before generation."""

    def memory(self) -> dict[str, float]:
        """Return bytes by name: device_allocated and device_peak, summed over the engine's devices, and host_rss."""

    def checksums(self) -> dict[str, int]:
        """Return a checksum of each tensor that answers depend on, by the engine's names; empty if not supported.

        Equal weights have equal checksums, whether they were loaded or came by a refit. The name of a tensor that a
        refit need not write ends with a word in brackets, such as "(buffer)".
        """
        return {}

    def notes(self) -> list[str]:
        """Return sentences about this engine for the user, such as one on an optimization that is off."""
