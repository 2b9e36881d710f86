"""A conversation of a person with a policy: turn by turn with its exact tokens, and the tools that it calls.

What the policy says is its own tokens, as in a run: the next prompt is the conversation so far and what was said since
(`Chat.link`), so that nothing that was sampled is encoded again.
"""

import queue
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from rlctl.data.chat import Chat
from rlctl.environments.contract import EnvironmentContract, Message
from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.environments.pool import EnvironmentPool
from rlctl.environments.tool_calls import parse_tool_calls
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest, turn_seed
from rlctl.rollout.conversation import Conversation
from rlctl.rollout.patience import TICK_S

# Rounds of tool calls before the policy has to answer.
MAX_CALLS = 16


class TalkError(RuntimeError):
    """A turn that cannot be had; one line for the person. What was said before it stays."""


class Sampler(Protocol):
    """Interface that a talk needs of `RolloutDispatcher`."""

    def submit(self, requests: Sequence[TurnRequest], submitter: Any) -> None:
        """Sample requests."""

    def abort(self, ids: Sequence[RequestId]) -> Any:
        """Stop sampling requests."""

    def repair(self) -> bool:
        """Replace engines that are lost. Raises RuntimeError when none is left."""


@dataclass(frozen=True)
class TalkTools:
    """Tools of one environment, whose instance lasts as long as the talk."""

    pool: EnvironmentPool
    contract: EnvironmentContract
    # Format of `tool_calls.PARSERS` in which the model calls.
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


class Talk:
    """One conversation. Methods are called from one thread.

    opening: messages that it begins with.
    """

    def __init__(
        self,
        chat: Chat,
        sampler: Sampler,
        limits: TalkLimits,
        identity: RolloutId,
        tools: TalkTools | None = None,
        opening: Sequence[Message] = (),
    ) -> None:
        self._chat, self._sampler, self._limits, self._tools = chat, sampler, limits, tools
        self._id = identity
        self._schemas = tools.contract.tools if tools else []
        self._stops = frozenset(chat.ends.stops)
        self._conversation, self._leaf = Conversation(), -1
        self._opening = list(opening)
        # Said since the last turn of the policy.
        self._added = list(opening)
        self._answers: queue.SimpleQueue[Completion] = queue.SimpleQueue()

    @property
    def length(self) -> int:
        """Tokens of the conversation so far."""
        return len(self._conversation.tokens(self._leaf)) if self._leaf >= 0 else 0

    def say(self, text: str) -> Iterator[Message]:
        """Say something, and yield what the policy and its tools answer, message by message.

        Raises TalkError; KeyboardInterrupt stops the turn under way. Either leaves out what was said last.
        """
        self._added.append({"role": "user", "content": text})
        for _ in range(MAX_CALLS):
            message, calls = self._turn()
            yield message
            if not calls or self._tools is None:
                return
            told = self._tools.pool.call(self._id, calls).result()
            if isinstance(told, EnvironmentFailure):
                raise TalkError(f"the environment failed: {told}")
            self._added = [each.message() for each in told]
            yield from self._added
        raise TalkError(f"called tools {MAX_CALLS} times without an answer")

    def _turn(self) -> tuple[Message, list[Any]]:
        """Sample the policy's next turn; return its message and the calls in it."""
        one = self._conversation
        try:
            prompt = self._prompt()
            completion = self._sampled(prompt)
        except BaseException:
            self._added = [] if one.turns else list(self._opening)
            raise
        if one.turns:
            self._leaf = one.add_context(prompt[self.length :], self._leaf)
        else:
            self._leaf = one.add_context(prompt, None)
        self._leaf = one.add_turn(completion, self._leaf)
        text = self._chat.turn_text(completion.tokens.tolist())
        message: Message = {"role": "assistant", "content": text}
        if completion.finish == "length":
            message["cut"] = True
        one.messages += [*self._added, {"role": "assistant", "content": text}]
        self._added = []
        calls = parse_tool_calls(text, self._tools.format, self._schemas).calls if self._tools else []
        return message, calls

    def _prompt(self) -> list[int]:
        """Return the tokens so far and those of what was said since."""
        one = self._conversation
        if not one.turns:
            return self._chat.prompt(self._added, self._schemas).tokens
        last = one.completions[-1].tokens.tolist()
        link = self._chat.link(one.messages[:-1], self._added, self._schemas)
        return one.tokens(self._leaf) + link.after(last, self._stops)

    def _sampled(self, prompt: list[int]) -> Completion:
        limits, turn = self._limits, self._conversation.turns
        room = min(limits.max_new_tokens, limits.max_length - len(prompt))
        if room < 1:
            what = f"the conversation would have {len(prompt):,} tokens of {limits.max_length:,}"
            raise TalkError(f"{what}: begin another with /new")
        request = TurnRequest(RequestId(self._id, turn), prompt, room, limits.temperature, turn_seed(limits.seed, turn))
        self._sampler.submit([request], self)
        try:
            while True:
                with suppress(queue.Empty):
                    return self._answers.get(timeout=TICK_S)
                self._sampler.repair()
        except BaseException:
            self._sampler.abort([request.id])
            raise

    def completed(self, answers: list[tuple[TurnRequest, Completion]]) -> None:
        """Take a turn, see `engine_queue.Submitter`."""
        for _, completion in answers:
            self._answers.put(completion)

    def restarted(self, requests: list[TurnRequest]) -> None:
        """Learn that a turn is sampled again by another engine."""
