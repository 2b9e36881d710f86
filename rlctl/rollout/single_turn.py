"""Player of rollouts of one turn: a prompt goes to an engine, and its answer is the rollout."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest
from rlctl.rollout.types import Rollout, RolloutStart, RolloutTaker


class Engines(Protocol):
    """Interface that a player needs of `RolloutDispatcher`."""

    def submit(
        self, requests: Sequence[TurnRequest], submitter: Any, *, ahead: bool = False, more: bool = False
    ) -> None:
        """Sample requests."""

    def finish(self, rollouts: Collection[RolloutId]) -> None:
        """Learn that no turn of these rollouts follows."""

    def abort(self, ids: Collection[RequestId]) -> list[RequestId]:
        """Stop sampling requests."""


@dataclass
class SingleTurnPlayer:
    """Plays rollouts of one prompt and one answer, see `RolloutPlayer`."""

    engines: Engines
    aborted_tokens: int = 0
    last_step: float = 0.0

    def play(self, starts: Sequence[RolloutStart], taker: RolloutTaker, *, ahead: bool = False) -> None:
        requests = [
            TurnRequest(RequestId(each.id), each.task.tokens, each.max_new_tokens, each.temperature, each.seed)
            for each in starts
        ]
        self.engines.submit(requests, _Turns(taker), ahead=ahead)

    def abort(self, ids: Collection[RolloutId]) -> list[RolloutId]:
        return [each.rollout for each in self.engines.abort([RequestId(each) for each in ids])]

    def check(self) -> None:
        pass

    def describe(self) -> str:
        return ""

    def close(self) -> None:
        pass


@dataclass(frozen=True, eq=False)
class _Turns:
    """Submitter whose answers are rollouts, see `engine_queue.Submitter`."""

    taker: RolloutTaker

    def completed(self, answers: list[tuple[TurnRequest, Completion]]) -> None:
        self.taker.ended([Rollout.of_turn(*each) for each in answers])

    def restarted(self, requests: list[TurnRequest]) -> None:
        self.taker.restarted([each.id.rollout for each in requests], afresh=True)
