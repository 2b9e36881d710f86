r"""Requests in flight in an engine: one record for each, from `submit` until `collect` returns its answer.

    submit -> RUNNING -- last token ------> DONE ---- collect --> gone
                 |  \--- engine poisoned -> FAILED -- collect raises --> gone
                 \------ abort -----------------------------------> gone

The engine's thread changes records, and a caller's thread waits for finished ones. A lock guards both.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.generation.engine import ENOUGH, GATHER_ROUNDS, GATHER_S, EngineStats
from rlctl.generation.requests import VALUE, Completion, RequestId, ScoreRequest, TurnRequest, token_versions
from rlctl.generation.vllm.scores import TokenScores

# `collect` waits for further answers only while at least this many requests per finished answer wait in the engine.
_WAITING_PER_ANSWER = 2
# Number of steps before a change of weights over which the ordinary gap between two steps is measured.
_ORDINARY_STEPS = 64


def after_step(stats: EngineStats, seconds: float, sequences: int, cache: Any) -> EngineStats:
    """Return the totals after one more step of `seconds` that sampled a token for each of `sequences` sequences.

    cache: vLLM's `PrefixCacheStats` since the start.
    """
    return replace(
        stats,
        busy=stats.busy + seconds,
        tokens=stats.tokens + sequences,
        steps=stats.steps + 1,
        prompt_tokens=cache.queries,
        cached_tokens=cache.hits,
    )


def stall(steps: list[float], begin: float, end: float) -> float:
    """Return the seconds that a change of weights in [begin, end] delayed running requests: the longest gap between two
    steps that overlaps [begin, end], minus the ordinary gap.

    steps: ascending times of steps. Returns 0 if no step came before, or none after.
    """
    gaps = [later - earlier for earlier, later in pairwise(steps) if later > begin and earlier < end]
    ordinary = ordinary_gap(steps, begin)
    return max(0.0, max(gaps) - ordinary) if gaps and ordinary else 0.0


def ordinary_gap(steps: list[float], begin: float) -> float:
    """Return the median gap between two steps before `begin`, seconds; 0 if there were no two steps."""
    steps_before = [step for step in steps if step <= begin][-_ORDINARY_STEPS:]
    gaps = [later - earlier for earlier, later in pairwise(steps_before)]
    return median(gaps) if gaps else 0.0


class TurnState(Enum):
    """State of a request in its engine."""

    RUNNING = auto()
    DONE = auto()
    FAILED = auto()


@dataclass
class ActiveTurn:
    """One request in an engine."""

    request: TurnRequest | ScoreRequest
    # (index of the first token, weight version) of each stretch of tokens that one version sampled.
    stretches: list[tuple[int, int]]
    state: TurnState = TurnState.RUNNING
    # vLLM's output, or the scores of given tokens (`TokenScores`), once DONE.
    output: Any = None

    def versions(self, length: int) -> NDArray[np.int32]:
        """Return the weight version of each of `length` tokens."""
        return token_versions(self.stretches, length)

    def completion(self) -> Completion:
        """Return the answer of a request that is DONE."""
        if isinstance(self.request, ScoreRequest):
            if not isinstance(self.output, TokenScores):
                return self._valued_token(self.request, self.output)
            return self._scored_tokens(self.request, self.output)
        tokens = np.asarray(self.output.token_ids, np.int32)
        log_probs = np.asarray(self.output.logprobs.logprobs, np.float32)
        return Completion(tokens, log_probs, self.versions(len(tokens)), self.output.finish_reason)

    def num_sampled(self, scheduled: int) -> int:
        """Return the number of sampled tokens. scheduled: that of vLLM's scheduler, for a request that is RUNNING."""
        if isinstance(self.request, ScoreRequest):
            return 0
        return len(self.output.token_ids) if self.output else scheduled

    def _scored_tokens(self, request: ScoreRequest, scores: TokenScores) -> Completion:
        tokens = np.asarray(request.tokens[request.start :], np.int32)
        return Completion(tokens, scores.log_probs, self.versions(len(tokens)), "length", scores.columns)

    def _valued_token(self, request: ScoreRequest, output: Any) -> Completion:
        """Return the answer with the value of the request's last token. output: vLLM's pooled output."""
        value = output.data.float().numpy().reshape(1)
        tokens = np.asarray(request.tokens[-1:], np.int32)
        return Completion(tokens, np.zeros(1, np.float32), self.versions(1), "length", {VALUE: value})


class ActiveRequests:
    """Requests in flight in an engine, by vLLM's name of each request (the text of its `RequestId`)."""

    def __init__(self) -> None:
        self._turns: dict[str, ActiveTurn] = {}
        # Records that are DONE or FAILED.
        self._ended: dict[str, ActiveTurn] = {}
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def __bool__(self) -> bool:
        """Return True if a request is running."""
        # Without the lock, since the engine's thread asks in each step. At worst the engine makes one idle step.
        return len(self._ended) < len(self._turns)

    def add(self, requests: Iterable[TurnRequest | ScoreRequest], version: int) -> list[str]:
        """Add requests that begin with weight version `version`; return their names.

        Raises ValueError, and adds no request, if one is in flight already.
        """
        new: dict[str, ActiveTurn] = {}
        with self._changed:
            for request in requests:
                name = str(request.id)
                if name in self._turns or name in new:
                    raise ValueError(f"request {name} is being sampled already")
                new[name] = ActiveTurn(request, [(0, version)])
            self._turns |= new
        return [*new]

    def request(self, name: str) -> TurnRequest | ScoreRequest:
        """Return a request in flight."""
        return self._turns[name].request

    def restart(self, name: str, version: int) -> TurnRequest | ScoreRequest:
        """Note that a request begins again from its first token with weight version `version`; return the request."""
        turn = self._turns[name]
        turn.stretches = [(0, version)]
        return turn.request

    def change(self, running: Iterable[tuple[str, int]], version: int) -> None:
        """Note that `version` became live. running: (name, number of tokens sampled so far) of continuing requests."""
        for name, tokens in running:
            self._turns[name].stretches.append((tokens, version))

    def finish(self, name: str, output: Any) -> None:
        """Mark a request as DONE, with vLLM's output, or with its scores. Its last token was sampled or scored."""
        with self._changed:
            turn = self._turns[name]
            turn.state = TurnState.DONE
            turn.output = output
            self._ended[name] = turn
            # Only the first and the last answer wake the thread that waits in `collect`.
            if len(self._ended) == 1 or not self:
                self._changed.notify_all()

    def abort(self, ids: Iterable[RequestId]) -> dict[str, ActiveTurn]:
        """Remove requests, finished or not; return the removed ones by name."""
        with self._changed:
            aborted = {}
            for name in map(str, ids):
                self._ended.pop(name, None)
                if turn := self._turns.pop(name, None):
                    aborted[name] = turn
            return aborted

    def fail(self, error: BaseException) -> None:
        """End running requests with an error, which the next `collect` raises."""
        with self._changed:
            self._failure = error
            for name, turn in self._turns.items():
                if turn.state is TurnState.RUNNING:
                    turn.state = TurnState.FAILED
                    self._ended[name] = turn
            self._changed.notify_all()

    def collect(self, patience_s: float, waiting: Callable[[], int] = lambda: 0) -> list[ActiveTurn]:
        """Wait at most `patience_s` seconds until a request is DONE; remove and return all DONE requests. Raises the
        error given to `fail` if it ended a request. waiting: returns how many requests of the engine have not begun.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self._ended, patience_s):
                self._gather(waiting)
            ended = self._ended
            self._ended = {}
            if self._failure and any(turn.state is TurnState.FAILED for turn in ended.values()):
                self._turns.clear()
                raise self._failure
            for name in ended:
                del self._turns[name]
            return list(ended.values())

    def _gather(self, waiting: Callable[[], int]) -> None:
        """Wait for further answers, so that one call returns several."""
        for _ in range(GATHER_ROUNDS):
            if self._changed.wait_for(lambda: not self, GATHER_S):
                return
            if not 0 < len(self._ended) < ENOUGH or waiting() < _WAITING_PER_ANSWER * len(self._ended):
                return
