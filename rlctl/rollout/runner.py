"""Runner of rollouts: plays each rollout in an asyncio task on the driver's event loop. The dispatcher samples turns.

    begin -> task -- policy.sample --> engines -- answer --> task goes on ... -- returns --> ended(rollout)
                                                              \
                                                               +-- stop --> cancelled, its turns aborted
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from rlctl.generation.requests import Completion, RolloutId, TurnRequest
from rlctl.rollout.policy import Player
from rlctl.rollout.types import Rollout, RolloutStart
from rlctl.utils.event_loop import EventLoop

# Called with a rollout that has ended.
Ended = Callable[[Rollout], None]
# `stop` waits at most this long for engines to confirm an abort. An engine that hangs gets no new work meanwhile.
_ABORT_S = 5.0
_CLOSE_S = 3.0
# Number of rollouts begun before the event loop's other tasks run again: 6 ms of a core at 50 us a rollout.
SLICE = 128


class Engines(Protocol):
    """The part of `RolloutDispatcher` that a runner uses. The methods must be called on the event loop."""

    @property
    def events(self) -> EventLoop:
        """Event loop on which rollouts are played."""

    async def sample_turn(self, request: TurnRequest, *, ahead: bool = False, turns_follow: bool = False) -> Completion:
        """Sample a turn, see `RolloutDispatcher.sample_turn`."""

    def finish(self, rollouts: Iterable[RolloutId]) -> None:
        """Note that these rollouts have no further turns."""


@dataclass(eq=False)
class RunningRollout:
    """One rollout in flight. It is the `Policy` that the player of this rollout samples with."""

    runner: "RolloutRunner"
    start: RolloutStart
    ended: Ended
    # True if its turns go before all other turns that wait for an engine.
    ahead: bool
    task: "asyncio.Task[None]" = field(init=False)
    # Number of turns of this rollout that wait for an engine or are being sampled.
    waits: int = 0
    # Number of sampled tokens in the finished turns of this try.
    sampled: int = 0
    is_stopped: bool = False

    async def sample(self, request: TurnRequest) -> Completion:
        if self.is_stopped:
            raise error_of_swallowing(self)
        if request.id.turn == 0:
            self.sampled = 0
        self.waits += 1
        try:
            completion = await self.runner.sample_turn(self, request)
        finally:
            self.waits -= 1
        self.sampled += len(completion.tokens)
        return completion


class RolloutRunner:
    """Plays rollouts with a dispatcher's engines. `begin` and `stop` must be called on the event loop."""

    def __init__(self, player: Player, engines: Engines) -> None:
        self._player = player
        self._engines = engines
        self.events = engines.events
        # Number of tokens in the finished turns of all rollouts stopped so far.
        self.aborted_tokens = 0
        self._closed = False
        self._last_step = 0.0
        self._running: dict[RolloutId, RunningRollout] = {}

    def begin(self, starts: Sequence[RolloutStart], ended: Ended, *, ahead: bool = False) -> None:
        """Begin rollouts; call `ended` with each one as it ends. ahead: their turns go before all waiting turns."""
        if self._closed:
            return
        for start in starts:
            rollout = RunningRollout(self, start, ended, ahead)
            self._running[start.id] = rollout
            rollout.task = self.events.spawn(self._play_rollout(rollout))

    async def begin_groups(
        self, groups: Iterable[Sequence[RolloutStart]], ended: Ended, *, ahead: bool = False
    ) -> None:
        """Begin the rollouts of groups, as `begin` does; let other tasks of the loop run after each `SLICE`."""
        num_begun = 0
        for starts in groups:
            self.begin(starts, ended, ahead=ahead)
            num_begun += len(starts)
            if num_begun >= SLICE:
                num_begun = 0
                await asyncio.sleep(0)

    async def stop(self, ids: Iterable[RolloutId], seconds: float = _ABORT_S) -> list[RolloutId]:
        """Stop these rollouts without calling `ended`. Returns the ids of the ones that were still running.

        Waits at most `seconds` until the engines have confirmed. Raises RuntimeError for a player that swallows its
        cancellation.
        """
        stopped = [self._running.pop(rollout_id) for rollout_id in ids if rollout_id in self._running]
        for rollout in stopped:
            rollout.is_stopped = True
            rollout.task.cancel()
        if stopped:
            await asyncio.wait([rollout.task for rollout in stopped], timeout=seconds)
        for rollout in stopped:
            # Only a rollout that waits for an engine's confirmation may still run.
            if not rollout.task.done() and not rollout.waits:
                raise error_of_swallowing(rollout)
        self.aborted_tokens += sum(rollout.sampled for rollout in stopped)
        return [rollout.start.id for rollout in stopped]

    async def sample_turn(self, rollout: RunningRollout, request: TurnRequest) -> Completion:
        """Sample a turn of a rollout."""
        turns_follow = self._player.several_turns
        completion = await self._engines.sample_turn(request, ahead=rollout.ahead, turns_follow=turns_follow)
        self._last_step = self.events.now()
        return completion

    @property
    def several_turns(self) -> bool:
        """True if finished turns of a rollout are kept when its engine is lost."""
        return self._player.several_turns

    def check(self) -> None:
        """Raise the first exception of a task on the event loop, if there was one."""
        self.events.check()

    @property
    def last_step(self) -> float:
        """Time at which a rollout last finished a turn or an environment last answered, by the event loop's clock."""
        return max(self._last_step, self._player.last_step)

    def describe(self) -> str:
        """Return a text on the rollouts that wait for anything but engines; empty if none does."""
        return self._player.describe()

    def close(self) -> None:
        """Stop all rollouts. From now on `begin` does nothing, and `ended` is not called."""
        if self._closed:
            return
        self._closed = True
        with suppress(RuntimeError):  # if something blocks the event loop, the run ends all the same
            self.events.run(self.stop(list(self._running), _CLOSE_S), 2 * _CLOSE_S)

    async def _play_rollout(self, rollout: RunningRollout) -> None:
        rollout_id = rollout.start.id
        try:
            played = await self._player.play(rollout.start, rollout)
        finally:
            # Do not call `finish` if the rollout was stopped and runs again in another task: that task has more turns.
            if self._player.several_turns and self._running.get(rollout_id, rollout) is rollout:
                self._engines.finish([rollout_id])
        # A rollout that was stopped meanwhile is not passed to `ended`.
        if self._running.get(rollout_id) is rollout:
            del self._running[rollout_id]
            rollout.ended(played)


def error_of_swallowing(rollout: RunningRollout) -> RuntimeError:
    """Return the error of a player that goes on after its cancellation."""
    return RuntimeError(f"the player of rollout {rollout.start.id} swallows its cancellation")
