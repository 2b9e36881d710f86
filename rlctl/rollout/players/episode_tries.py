"""Tries of an episode: awaits the actions of its environment, and repeats the episode after a failure (contract 11).

A failure of the environment does not become a reward: the episode is played again from its task with the same seeds. If
it fails too often, it is left out.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from rlctl.data.files import DataError
from rlctl.environments.contract import Reward
from rlctl.environments.environment_pool import POOL_CLOSED, EnvironmentPool
from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.generation.requests import RolloutId
from rlctl.rollout.players.episode_state import EpisodeLimits, EpisodeState
from rlctl.rollout.types import Rollout, RolloutStart
from rlctl.utils.event_loop import done

Value = TypeVar("Value")
_EPISODE_LEFT_OUT = "the episode is left out and counted"


class EpisodeFailed(Exception):
    """A failure that ends a try of an episode."""

    def __init__(self, failure: EnvironmentFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class EpisodeTries:
    """Plays episodes with the environments of one pool, within budgets. Repeats a failed episode up to
    `limits.max_retries` times."""

    def __init__(self, pool: EnvironmentPool, limits: EpisodeLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.last_step = 0.0
        # Episode that waits for its environment -> begin of the wait.
        self._waits_since: dict[RolloutId, float] = {}

    async def play(self, start: RolloutStart, attempt: Callable[[EpisodeState], Awaitable[Reward | None]]) -> Rollout:
        """Play an episode until a try succeeds or none is left; return its rollout. attempt: plays one try."""
        episode = EpisodeState(start, self.limits)
        try:
            while True:
                episode.begin(_now())
                try:
                    return self._refuse_too_long(episode, episode.rollout(await attempt(episode), None))
                except EpisodeFailed as error:
                    episode.failures += 1
                    if episode.failures > self.limits.max_retries or error.failure == POOL_CLOSED:
                        return episode.rollout(None, error.failure)
                except DataError as error:
                    # The row or the template is wrong: another try would fail too.
                    failure = EnvironmentFailure("contract", str(error))
                    self.pool.failures.add("rollout", failure, fate=_EPISODE_LEFT_OUT)
                    return episode.rollout(None, failure)
        finally:
            self._waits_since.pop(start.id, None)
            # No effect if a failure has already ended the episode in the pool.
            self.pool.close(start.id)

    async def ask(
        self, episode: EpisodeState, action: "Future[Value | EnvironmentFailure]", *, waits: bool = True
    ) -> Value:
        """Await an action of the environment and return its outcome. Raises EpisodeFailed if the action failed.

        If the wait is cancelled, the action goes on. waits: True if the episode waits for nothing else, so that the
        seconds count as the environment's.
        """
        begin = _now()
        if waits:
            self._waits_since[episode.start.id] = begin
        await done(action)
        self.last_step = _now()
        if waits:
            episode.environment_s += self.last_step - begin
            self._waits_since.pop(episode.start.id, None)
        answer = POOL_CLOSED if action.cancelled() else action.result()
        if isinstance(answer, EnvironmentFailure):
            raise EpisodeFailed(answer)
        return answer

    def describe(self) -> str:
        """Return a text on how many episodes wait for their environment, and how long; empty if none does."""
        begin_times = list(self._waits_since.values())
        if not begin_times:
            return ""
        longest_s = self.pool.events.now() - min(begin_times)
        return f"; {len(begin_times)} episodes wait for their environment, the longest for {longest_s:.0f} s"

    def note_spelled(self, episode: EpisodeState, spelled: list[str]) -> None:
        """Count control tokens in the text of messages to the policy. Warn once for each environment."""
        episode.spelled += len(spelled)
        if spelled:
            cause = f"spells {spelled[0]}, which is encoded as text and not as that control token"
            remedy = "counted in environment/spelled_tokens; data.special_tokens=allow makes tokens of them"
            self.pool.failures.note(self.pool.key_of(episode.start.task.row), f"{cause}; {remedy}")

    def note_unwritten(self, episode: EpisodeState, count: int) -> None:
        """Count messages that the chat template leaves out. Warn once for each environment or agent."""
        episode.unwritten += count
        if count:
            key = self.pool.key_of(episode.start.task.row)
            text = "the chat template leaves some out, and the model does not see them; set another data.chat_template"
            self.pool.failures.note(f"{key}'s messages", f"{text}; counted in environment/unwritten_messages")

    def _refuse_too_long(self, episode: EpisodeState, rollout: Rollout) -> Rollout:
        """Return the rollout. If its rows are too large for one micro-batch, return a failed one, and warn once."""
        limit = self.limits.max_trained
        num_rows = len(rollout.rows)
        if limit is None or num_rows < 2 or rollout.num_tokens <= limit or rollout.id.purpose != "train":
            return rollout
        cause = f"rows of an episode have more tokens than a micro-batch, {limit}, and grpo.loss needs whole rollouts"
        sizes = f"{num_rows} rows of {rollout.num_tokens}"
        remedy = f"{sizes}; raise trainer.micro_batch_tokens or lower environment.max_turns"
        failure = EnvironmentFailure("too_long", cause, remedy)
        self.pool.failures.add("history", failure, fate=_EPISODE_LEFT_OUT)
        return episode.rollout(None, failure)


def _now() -> float:
    return asyncio.get_running_loop().time()
