"""Scores of sequences under frozen models, from engines (`Engine.score`): log-probs, or values of a value head.

Scoring begins as soon as a group has its rewards, and a step waits for the rest. Each sequence is scored once, though
several rollouts have it. The scores of a sequence are a function of its tokens and the frozen weights, so a lost engine
is rebuilt and scores its sequences again. A sequence that the model cannot score has NaN at its sampled tokens: its
rollout is left out of the step, and counted.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlctl.config.schema import RunSection
from rlctl.generation.engine import EngineStats
from rlctl.generation.requests import (
    TOP_IDS,
    TOP_LOG_PROBS,
    VALUE,
    Completion,
    RequestId,
    RolloutId,
    ScoreRequest,
)
from rlctl.rollout.wait_deadline import TICK_S, Emit, WaitDeadline

if TYPE_CHECKING:
    # It imports Ray, which a thread that loads tokenizers must not do: the main thread starts Ray meanwhile.
    from rlctl.rollout.dispatcher import RolloutDispatcher

Scores = NDArray[np.float32]
# Number of later steps after which the scores of a sequence that no step took are forgotten, beyond the largest age.
_KEPT_STEPS = 2


@dataclass(frozen=True)
class GivenTokens:
    """A sequence of T tokens to score."""

    tokens: NDArray[np.int32]
    # bool [T]: true at the tokens whose log-probs are needed.
    sampled: NDArray[np.bool_]

    @property
    def start(self) -> int:
        """Index of the first token to score. No token comes before the token 0."""
        return max(1, int(self.sampled.argmax()))

    @property
    def key(self) -> tuple[bytes, int]:
        """Key that is equal for sequences with the same scores."""
        return self.tokens.tobytes(), self.start


@dataclass
class _Scoring:
    """A sequence that is being scored, or was."""

    # None: the model cannot score the sequence.
    answer: "asyncio.Task[Completion] | None"
    # Number of steps that had been scored before.
    begun: int


class FrozenScores:
    """Scores of one frozen model. `begin` may be called on any thread, the other methods on the training thread."""

    def __init__(
        self,
        dispatcher: "RolloutDispatcher",
        run: RunSection,
        emit: Emit,
        *,
        name: str,
        temperature: float,
        longest: int,
        max_age: int,
        has_value_head: bool = False,
        top: int = 0,
        num_tokens: int | None = None,
    ) -> None:
        """name: the role of the model. longest: most tokens of a sequence that the engines score.

        has_value_head: the scores are values, of the last token of each sequence alone. top: above 0, the scores are
        the `top` likeliest tokens at each place. num_tokens: as of `ScoreRequest`.
        """
        self._dispatcher = dispatcher
        self._events = dispatcher.events
        self._name = name
        self._temperature = temperature
        self._top = top
        self._num_tokens = num_tokens
        self._longest = longest
        self._has_value_head = has_value_head
        self._kept_steps = max_age + _KEPT_STEPS
        self._wait_deadline = WaitDeadline(self._events.now, run, emit)
        # These fields belong to the event loop.
        self._scorings: dict[tuple[bytes, int], _Scoring] = {}
        self._requests = 0
        self._steps = 0

    def begin(self, sequences: Sequence[GivenTokens]) -> None:
        """Begin to score sequences; those that are scored already cost nothing."""
        self._events.ask(lambda: self._begin(sequences))

    def scores(self, sequences: Sequence[GivenTokens]) -> list[Scores]:
        """Return the log-probs or values of each sequence, float32 [T]; 0 before its first sampled token.

        With `top` they are float32 [T, top, 2]: the id and the log-prob of each likely token. Lost engines are replaced
        meanwhile. Raises RuntimeError when nothing was scored for `run.deadline_s`, or when `generation.max_restarts`
        are used up.
        """
        if self._dispatcher.has_lost:
            # An idle engine is rebuilt too.
            self._dispatcher.repair()
        self.begin(sequences)
        self._wait_deadline.note_progress()
        left = len(sequences)
        while missing := self._events.run(self._wait_a_tick(sequences)):
            if missing < left or self._dispatcher.repair():
                self._wait_deadline.note_progress()
            left = missing
            explain = _explanation(self._name, missing, self._dispatcher.describe)
            self._wait_deadline.check(self._dispatcher.last_step(), explain)
        return self._events.ask(lambda: self._take(sequences))

    def stats(self) -> list[EngineStats]:
        """Return the totals of each engine, see `RolloutDispatcher.stats`."""
        return self._dispatcher.stats()

    def close(self) -> None:
        """Stop scoring for good."""
        self._dispatcher.close()

    def _begin(self, sequences: Sequence[GivenTokens]) -> None:
        for sequence in sequences:
            if sequence.key in self._scorings:
                continue
            request = self._request(sequence)
            answer = self._events.spawn(self._dispatcher.sample_turn(request)) if request else None
            self._scorings[sequence.key] = _Scoring(answer, self._steps)

    def _request(self, sequence: GivenTokens) -> ScoreRequest | None:
        """Return the request for a sequence; None if the model cannot score it."""
        self._requests += 1
        request_id = RequestId(RolloutId("train", self._name, self._requests, 0))
        if not sequence.start < len(sequence.tokens) <= self._longest:
            return None
        return ScoreRequest(
            request_id,
            sequence.tokens.tolist(),
            sequence.start,
            top=self._top,
            temperature=self._temperature,
            num_tokens=self._num_tokens,
        )

    async def _wait_a_tick(self, sequences: Sequence[GivenTokens]) -> int:
        """Wait until all sequences are scored, an engine is lost, or TICK_S is over; return how many are missing."""
        answers = {self._scorings[sequence.key].answer for sequence in sequences}
        missing = {answer for answer in answers if answer is not None and not answer.done()}
        if missing:
            _, missing = await asyncio.wait(missing, timeout=TICK_S)
        return len(missing)

    def _take(self, sequences: Sequence[GivenTokens]) -> list[Scores]:
        """Return the scores of scored sequences, and forget sequences that no step took."""
        columns = [self._column(sequence) for sequence in sequences]
        for sequence in sequences:
            self._scorings.pop(sequence.key, None)
        self._steps += 1
        oldest = self._steps - self._kept_steps
        self._scorings = {key: scoring for key, scoring in self._scorings.items() if scoring.begun >= oldest}
        return columns

    def _column(self, sequence: GivenTokens) -> Scores:
        answer = self._scorings[sequence.key].answer
        shape = (len(sequence.tokens), self._top, 2) if self._top else (len(sequence.tokens),)
        column = np.full(shape, np.nan, np.float32)
        column[: sequence.start] = 0.0
        if answer is None:
            return column
        columns = answer.result().columns
        if self._top:
            column[sequence.start :] = np.stack((columns[TOP_IDS], columns[TOP_LOG_PROBS]), -1)
        else:
            column[sequence.start :] = columns[VALUE] if self._has_value_head else answer.result().log_probs
        return column


def _explanation(name: str, missing: int, describe: Callable[[], str]) -> Callable[[], str]:
    """Return a function that explains the wait for the scores of `missing` sequences."""
    return lambda: f"the step waits for {missing} scores of the {name}; {describe()}"
