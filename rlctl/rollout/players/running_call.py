"""A running call of a rollout function or an agent: its actions in the user's process, and its turns on engines."""

import asyncio
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.generation.requests import Completion, TurnRequest
from rlctl.rollout.players.episode_state import EpisodeState
from rlctl.rollout.players.episode_tries import EpisodeTries
from rlctl.rollout.policy import Policy

# Message of the user's process, and the player's record of a sample.
Message = TypeVar("Message")
Sample = TypeVar("Sample")


class RunningCall(Generic[Message, Sample]):
    """Actions and samples in flight of one call. Use it in `async with`: at the end of the block nothing is in
    flight."""

    def __init__(self, tries: EpisodeTries, episode: EpisodeState, policy: Policy) -> None:
        self._tries = tries
        self._episode = episode
        self._policy = policy
        # Actions that the process has not answered, oldest first.
        self._actions: deque[asyncio.Task[Message]] = deque()
        self._sampling: dict[asyncio.Task[Completion], Sample] = {}
        # Number of turns requested from engines so far.
        self.turns = 0

    @property
    def has_action(self) -> bool:
        """True while there is an action that the process has not answered."""
        return bool(self._actions)

    @property
    def num_sampling(self) -> int:
        """Number of turns that are being sampled."""
        return len(self._sampling)

    def act(self, action: "Future[Message | EnvironmentFailure]", *, waits: bool) -> None:
        """Add an action that the process performs. waits: see `EpisodeTries.ask`."""
        work = self._tries.ask(self._episode, action, waits=waits)
        self._actions.append(asyncio.get_running_loop().create_task(work))

    def sample(self, sample: Sample, request: TurnRequest) -> None:
        """Begin to sample the next turn. sample: returned by `wait` with the completion."""
        self._sampling[asyncio.get_running_loop().create_task(self._policy.sample(request))] = sample
        self.turns += 1

    async def wait(self) -> tuple[list[tuple[Sample, Completion]], Message | None]:
        """Wait until a sample has ended or the process has answered the oldest action.

        Return (ended samples with their completions, the process's answer or None). Raises EpisodeFailed if the process
        failed.
        """
        await asyncio.wait([*self._sampling, *list(self._actions)[:1]], return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in self._sampling if task.done()]
        completions = [(self._sampling.pop(task), task.result()) for task in ended]
        if not self._actions or not self._actions[0].done():
            return completions, None
        return completions, self._actions.popleft().result()

    async def __aenter__(self) -> "RunningCall[Message, Sample]":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Cancel actions without an answer, and wait until no engine samples, so that the same turns may be sampled
        again."""
        # A coroutine that is closed (GeneratorExit) must not await anything.
        if kind is None or issubclass(kind, Exception | asyncio.CancelledError):
            for action in self._actions:
                action.cancel()
            await _wait_until_ended([*self._sampling, *self._actions])


async def _wait_until_ended(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Wait until all tasks have ended. If this wait is cancelled, cancel the tasks and wait again."""
    if not tasks:
        return
    try:
        this_task = asyncio.current_task()
        if this_task and this_task.cancelling():
            raise asyncio.CancelledError
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
    finally:
        for task in tasks:
            # Read each task's exception, so that asyncio does not report it as never retrieved.
            _ = task.done() and not task.cancelled() and task.exception()
