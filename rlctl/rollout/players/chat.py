"""Player of `rlctl chat`: a person says something, and the policy answers, with the tools that it calls (contract 4).

A conversation goes on from rollout to rollout: each one is the policy's answer to the person's last message.
"""

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.data.tasks import Task
from rlctl.environments.contract import EnvironmentContract, Message
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.generation.requests import RolloutId
from rlctl.rollout.conversation import Conversation
from rlctl.rollout.players.episode_state import EpisodeLimits, EpisodeState
from rlctl.rollout.players.episode_tries import EpisodeFailed, EpisodeTries
from rlctl.rollout.players.tool_loop import ToolLoop
from rlctl.rollout.policy import Player, Policy
from rlctl.rollout.runner import Engines, RolloutRunner
from rlctl.rollout.types import Rollout, RolloutStart
from rlctl.rollout.wait_deadline import TICK_S

# Turns in which the policy has to answer: all but the last may call tools.
MAX_CALLS = 16


class TalkError(RuntimeError):
    """An answer that cannot be given; one line for the person. Earlier turns stay."""


@dataclass(frozen=True)
class TalkTools:
    """Tools of one environment, whose instance lasts as long as the talk."""

    pool: EnvironmentPool
    contract: EnvironmentContract
    # Format of `tool_formats.PARSERS` in which the model calls.
    format: str


@dataclass(frozen=True)
class TalkLimits:
    """Bounds and sampling of a talk."""

    # Tokens of one turn, and of the whole conversation.
    max_new_tokens: int
    max_length: int
    # 0 is greedy.
    temperature: float
    seed: int


def talk_id(number: int) -> RolloutId:
    """Return the identity of a talk; the instance of its environment has it too. number: counts those of a process."""
    return RolloutId("validation", "talk", number, 0)


class ChatPlayer(Player):
    """Plays the answers of one conversation. The text of a start's task is the person's message.

    opening: messages that it begins with. tell: takes each message of the policy and of a tool as it comes.
    """

    several_turns = True

    def __init__(
        self,
        chat: Chat,
        max_length: int,
        tools: TalkTools | None,
        opening: Sequence[Message],
        tell: Callable[[Message], None],
    ) -> None:
        self._limits = EpisodeLimits(MAX_CALLS, max_length, float("inf"), 0, "keep")
        self._schemas, self._opening = tools.contract.tools if tools else [], list(opening)
        tries = EpisodeTries(tools.pool, self._limits) if tools else None
        self._loop = ToolLoop(chat, tries, tools.format if tools else None, tell)
        self._conversation, self._leaf = Conversation(), -1

    @property
    def length(self) -> int:
        """Tokens of the conversation so far."""
        return len(self._conversation.tokens(self._leaf)) if self._leaf >= 0 else 0

    async def play(self, start: RolloutStart, policy: Policy) -> Rollout:
        one, limits = self._conversation, self._limits
        episode = EpisodeState(start, replace(limits, max_turns=one.turns + limits.max_turns), one, self._leaf)
        self._loop.add(episode, [*([] if one.turns else self._opening), {"role": "user", "content": start.task.text}])
        failure = None
        try:
            if await self._loop.answer(episode, self._schemas, policy) is None:
                failure = self._budget_text(episode)
        except EpisodeFailed as error:
            failure = f"the environment failed: {error}"
        except DataError as error:
            failure = str(error)
        finally:
            self._forget_unanswered()
        return episode.rollout(None, EnvironmentFailure("contract", failure) if failure else None)

    def _budget_text(self, episode: EpisodeState) -> str:
        if episode.ending == "max_turns":
            return f"called tools {MAX_CALLS} times without an answer"
        length = len(episode.conversation.tokens(episode.leaf))
        what = f"the conversation would have {length:,} tokens of {episode.limits.max_length:,}"
        return f"{what}: begin another with /new"

    def _forget_unanswered(self) -> None:
        """Remove the messages after the policy's last turn."""
        one = self._conversation
        self._leaf = max((index for index, node in enumerate(one.nodes) if node.completion), default=-1)
        del one.nodes[self._leaf + 1 :]
        while one.messages and not (one.turns and one.messages[-1]["role"] == "assistant"):
            one.messages.pop()


class TalkEngines(Engines, Protocol):
    """Interface that a talk needs of `RolloutDispatcher`."""

    def repair(self) -> bool:
        """Replace engines that are lost. Raises RuntimeError when none is left."""


class Talk:
    """One conversation. Methods are called from one thread.

    opening: messages that it begins with.
    """

    def __init__(
        self,
        chat: Chat,
        engines: TalkEngines,
        limits: TalkLimits,
        identity: RolloutId,
        tools: TalkTools | None = None,
        opening: Sequence[Message] = (),
    ) -> None:
        self._engines, self._limits, self._id = engines, limits, identity
        # Messages, and the rollout that ends an answer.
        self._told: queue.SimpleQueue[Message | Rollout] = queue.SimpleQueue()
        self._player = ChatPlayer(chat, limits.max_length, tools, opening, lambda message: self._told.put(message))
        self._runner = RolloutRunner(self._player, engines)

    @property
    def length(self) -> int:
        """Tokens of the conversation so far."""
        return self._player.length

    def say(self, text: str) -> Iterator[Message]:
        """Say something, and yield the answers of the policy and its tools, message by message.

        Raises TalkError; KeyboardInterrupt stops the turn in flight. Either removes the person's last message.
        """
        limits, task = self._limits, Task("talk", [], text, None)
        start = RolloutStart(self._id, task, limits.max_new_tokens, limits.temperature, limits.seed, 0)
        try:
            self._runner.check()
            self._runner.events.ask(lambda: self._runner.begin([start], self._told.put))
            while not isinstance(told := self._next(), Rollout):
                yield told
        except BaseException:
            self._runner.events.run(self._runner.stop([self._id]))
            self._told = queue.SimpleQueue()
            raise
        if told.episode and told.episode.failure:
            raise TalkError(told.episode.failure)

    def _next(self) -> Message | Rollout:
        while True:
            with suppress(queue.Empty):
                return self._told.get(timeout=TICK_S)
            self._runner.check()
            self._engines.repair()
