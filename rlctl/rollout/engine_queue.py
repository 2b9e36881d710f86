"""Queue of one engine: the requests that it has, and the orders that it is yet to be sent."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol
from weakref import WeakSet

from rlctl.generation.engine import ENOUGH, GATHER_MOST_S, Engine, EngineStats
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest
from rlctl.workers.group import Worker

Answer = tuple[TurnRequest, Completion]
Order = Callable[[Engine, list[Any]], int | None]


class Submitter(Protocol):
    """Whoever submits requests. Must not call the dispatcher from `completed`, nor hold a lock when it submits."""

    def completed(self, answers: list[Answer]) -> None:
        """Take answers, on a thread of the dispatcher."""

    def restarted(self, requests: list[TurnRequest]) -> None:
        """Learn that requests were lost with their engine and begin again, on the thread that called `repair` or
        `resume`."""


class RequestState(Enum):
    """State of a request, see the head of dispatcher.py."""

    PENDING = auto()
    SAMPLING = auto()
    ABORTING = auto()


@dataclass(eq=False, slots=True)
class SubmittedTurn:
    """One request on its way."""

    request: TurnRequest
    submitter: Submitter
    # Turns of its rollout may follow, until `RolloutDispatcher.finish`.
    more: bool = False
    state: RequestState = RequestState.PENDING


def handed_out_together(submitted: Sequence[SubmittedTurn]) -> list[list[SubmittedTurn]]:
    """Return what is handed out together: first turns of a group in a row, and turns of one rollout in a row."""
    groups: list[list[SubmittedTurn]] = []
    for each in submitted:
        own, before = each.request.id, groups[-1][-1].request.id if groups else None
        first = before is not None and own.turn == before.turn == 0 and own.rollout.siblings == before.rollout.siblings
        if before is not None and (first or own.rollout == before.rollout):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


@dataclass(eq=False)
class EngineQueue:
    """One engine and its requests."""

    worker: Worker
    # When it last did anything.
    last: float
    # SAMPLING and ABORTING ones.
    requests: dict[RequestId, SubmittedTurn] = field(default_factory=dict)
    # Methods and their arguments that it has not been sent yet, and since when the first of them waits.
    orders: deque[tuple[Order, list[Any]]] = field(default_factory=deque)
    ordered: float = 0.0
    stats: EngineStats = field(default_factory=EngineStats)
    # Rollouts that it began, and of which turns may follow.
    episodes: WeakSet[RolloutId] = field(default_factory=WeakSet)
    # Why it must be replaced.
    lost: Exception | None = None

    def sampling(self) -> list[SubmittedTurn]:
        """Return what somebody waits for."""
        return [each for each in self.requests.values() if each.state is RequestState.SAMPLING]

    def order(self, method: Order, what: list[Any], now: float) -> None:
        """Queue an order; join it to the one before if that is of its kind."""
        if not self.orders:
            self.ordered = now
        if self.orders and self.orders[-1][0] == method:
            self.orders[-1][1].extend(what)
        else:
            self.orders.append((method, what))

    def gathers(self, at_a_time: int) -> float:
        """Return until when the first order waits for others like it, by the clock of `order`.

        at_a_time: requests that the engine decodes. Only an engine that has more is made to wait: each call takes time
        of its steps.
        """
        (method, what), *others = self.orders
        waits = method == Engine.submit and not others and len(what) < ENOUGH
        spare = len(self.requests) - len(what) - at_a_time
        return self.ordered + (GATHER_MOST_S if waits and spare >= len(what) else 0.0)
