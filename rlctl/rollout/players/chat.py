"""Player of `rlctl chat`: a person says something, and the policy answers, with the tools that it calls (contract 4).

Each rollout is the policy's answer to the person's last message. All rollouts of a talk share one conversation.
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

# The most turns of one answer. All turns but the last may call tools.
MAX_CALLS = 16


class TalkError(RuntimeError):
    """An answer that cannot be given. The message is one line for the person; earlier turns of the talk stay."""


@dataclass(frozen=True)
class TalkTools:
    """Tools of one environment. Its instance lasts as long as the talk."""

    pool: EnvironmentPool
    contract: EnvironmentContract
    # Format in which the model calls tools: a key of `tool_formats.PARSERS`.
    format: str


@dataclass(frozen=True)
class TalkLimits:
    """Budgets and sampling settings of a talk."""

    # The most tokens of one turn, and of the whole conversation.
    max_new_tokens: int
    max_length: int
    # 0 is greedy.
    temperature: float
    seed: int


def talk_id(number: int) -> RolloutId:
    """Return the id of a talk, also used for its environment's instance. number: unique in the process."""
    return RolloutId("validation", "talk", number, 0)


class ChatPlayer(Player):
    """Plays the answers of one conversation. The text of a start's task is the person's message.

    opening: messages that the conversation begins with. tell: called with each message of the policy and of a tool.
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
        self._limits = EpisodeLimits(
            max_turns=MAX_CALLS, max_length=max_length, timeout_s=float("inf"), max_retries=0, history="keep"
        )
        self._schemas = tools.contract.tools if tools else []
        self._opening = list(opening)
        tries = EpisodeTries(tools.pool, self._limits) if tools else None
        self._tool_loop = ToolLoop(chat, tries, tools.format if tools else None, tell)
        self._conversation = Conversation()
        # Node of the policy's last turn; -1 before the first.
        self._leaf = -1

    @property
    def length(self) -> int:
        """Number of tokens in the conversation so far."""
        return len(self._conversation.tokens(self._leaf)) if self._leaf >= 0 else 0

    async def play(self, start: RolloutStart, policy: Policy) -> Rollout:
        conversation = self._conversation
        # The budget counts the turns of the whole conversation, so add those of earlier answers.
        limits = replace(self._limits, max_turns=conversation.turns + self._limits.max_turns)
        episode = EpisodeState(start, limits, conversation, self._leaf)
        messages: list[Message] = [] if conversation.turns else list(self._opening)
        messages.append({"role": "user", "content": start.task.text})
        self._tool_loop.add(episode, messages)
        failure = None
        try:
            if await self._tool_loop.answer(episode, self._schemas, policy) is None:
                failure = self._explain_budget(episode)
        except EpisodeFailed as error:
            failure = f"the environment failed: {error}"
        except DataError as error:
            failure = str(error)
        finally:
            self._forget_unanswered()
        return episode.rollout(None, EnvironmentFailure("contract", failure) if failure else None)

    def _explain_budget(self, episode: EpisodeState) -> str:
        if episode.ending == "max_turns":
            return f"called tools {MAX_CALLS} times without an answer"
        length = len(episode.conversation.tokens(episode.leaf))
        return (
            f"the conversation would have {length:,} tokens of {episode.limits.max_length:,}: begin another with /new"
        )

    def _forget_unanswered(self) -> None:
        """Remove the messages after the policy's last turn."""
        nodes = self._conversation.nodes
        messages = self._conversation.messages
        self._leaf = max((index for index, node in enumerate(nodes) if node.completion), default=-1)
        del nodes[self._leaf + 1 :]
        while messages and not (self._conversation.turns and messages[-1]["role"] == "assistant"):
            messages.pop()


class TalkEngines(Engines, Protocol):
    """The part of `RolloutDispatcher` that a talk uses."""

    def repair(self) -> bool:
        """Replace engines that are lost. Raises RuntimeError when none is left."""


class Talk:
    """One conversation with a person. All methods must be called from one thread.

    opening: messages that the conversation begins with.
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
        self._engines = engines
        self._limits = limits
        self._id = identity
        # Messages of the current answer as they come, then its rollout.
        self._news: queue.SimpleQueue[Message | Rollout] = queue.SimpleQueue()
        # A lambda, so that `self._news` is read at each message: `say` may replace it.
        self._player = ChatPlayer(chat, limits.max_length, tools, opening, lambda message: self._news.put(message))
        self._runner = RolloutRunner(self._player, engines)

    @property
    def length(self) -> int:
        """Number of tokens in the conversation so far."""
        return self._player.length

    def say(self, text: str) -> Iterator[Message]:
        """Send the person's message; yield the messages of the policy and its tools as they come.

        Raises TalkError if there is no answer. KeyboardInterrupt stops the turn in flight. Both remove the person's
        last message from the conversation.
        """
        start = RolloutStart(
            id=self._id,
            task=Task(id="talk", tokens=[], text=text, answer=None),
            max_new_tokens=self._limits.max_new_tokens,
            temperature=self._limits.temperature,
            seed=self._limits.seed,
            group_seed=0,
        )
        try:
            self._runner.check()
            self._runner.events.ask(lambda: self._runner.begin([start], self._news.put))
            news = self._wait_for_news()
            while not isinstance(news, Rollout):
                yield news
                news = self._wait_for_news()
        except BaseException:
            self._runner.events.run(self._runner.stop([self._id]))
            self._news = queue.SimpleQueue()
            raise
        if news.episode and news.episode.failure:
            raise TalkError(news.episode.failure)

    def _wait_for_news(self) -> Message | Rollout:
        while True:
            with suppress(queue.Empty):
                return self._news.get(timeout=TICK_S)
            self._runner.check()
            self._engines.repair()
