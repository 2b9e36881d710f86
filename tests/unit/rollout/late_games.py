"""Stand-ins for the chat and the environments of a schedule, in this process and in virtual time."""

import random
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rlctl.data.chat import TurnLink
from rlctl.environments.messages import FunctionEnded, FunctionWaits
from rlctl.environments.outcomes import EnvironmentFailure
from tests.virtual_events import VirtualEvents


class StubChat:
    """Stand-in for `Chat`. Every prompt and every message of the environment has one or two tokens."""

    ends = SimpleNamespace(stops=())
    template = None

    def prompt(self, messages: Any, tools: Any) -> SimpleNamespace:
        return SimpleNamespace(tokens=[5, 9], spelled=[])

    def find_spelled(self, messages: Any) -> list[str]:
        return []

    def turn_text(self, tokens: Any) -> str:
        return "said"

    def link(self, messages: Any, added: Any, tools: Any) -> TurnLink:
        return TurnLink([], [8])


@dataclass
class FunctionCall:
    """State of one call of a rollout function."""

    # Number of samples that the function received.
    num_taken: int = 0
    # Number of received samples that the function has reported to the player.
    num_reported: int = 0
    # The action that waits for a sample.
    waiting: "Future[Any] | None" = None


class LateGames:
    """Stand-in for environments, in this process: they answer late and in any order, and may fail."""

    def __init__(self, draw: random.Random, trouble: float, events: VirtualEvents) -> None:
        self.random = draw
        self.trouble = trouble
        self.events = events
        self.unanswered: list[tuple[Future[Any], Any]] = []
        # State of the function of each episode.
        self.calls: dict[Any, FunctionCall] = {}

    def key_of(self, row: Any) -> str:
        return "game"

    def reset(self, episode: Any, row: Any, seed: int) -> "Future[Any]":
        return self._answer_later([{"role": "user", "content": "play"}])

    def step(self, episode: Any, message: str) -> "Future[Any]":
        return self._answer_later(self.random.choice(["more", "more", None]))

    def reward(self, episode: Any, columns: Any = None) -> "Future[Any]":
        return self._answer_later(1.0)

    def check(self) -> None:
        """Do nothing, because this stand-in has no process that may fail."""

    def close(self, episode: Any) -> None:
        pass

    # A rollout function: two samples side by side, and one more when it has both.

    def begin(self, episode: Any, task: Any, seed: int) -> "Future[Any]":
        self.calls[episode] = FunctionCall()
        return self._answer_later(FunctionWaits([[5, 9], [5, 9]], 0))

    def resume(self, episode: Any, answers: list[Any], *, waits: bool) -> "Future[Any]":
        call = self.calls[episode]
        if call.waiting:
            call.waiting.set_result(FunctionWaits([], call.num_taken - call.num_reported))
            call.num_reported = call.num_taken
            call.waiting = None
        call.num_taken += len(answers)
        num_new = call.num_taken - call.num_reported
        if answers and call.num_taken >= 2:
            call.num_reported = call.num_taken
            if call.num_taken == 3:
                return self._answer_later(FunctionEnded(num_new, 1.0))
            return self._answer_later(FunctionWaits([[5, 9, 8]], num_new))
        call.waiting = Future()
        return call.waiting

    def answer(self) -> None:
        """Answer some of the waiting requests."""
        for _ in range(min(len(self.unanswered), self.random.randint(0, 6))):
            future, answer = self.unanswered.pop(self.random.randrange(len(self.unanswered)))
            if self.random.random() < 3 * self.trouble:
                future.set_result(EnvironmentFailure("died", "its process ended"))
            else:
                future.set_result(answer)

    def _answer_later(self, answer: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.unanswered.append((future, answer))
        return future
