"""`rlctl chat`: exact tokens over the turns of a conversation, results of tools, and Ctrl-C that ends only one turn."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlctl.data.chat import Chat
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.outcomes import EnvironmentSpec
from rlctl.generation.requests import Completion, RequestId, TurnRequest
from rlctl.rollout.players.chat import Talk, TalkError, TalkLimits, TalkTools, talk_id
from rlctl.utils.event_loop import EventLoop
from tests.unit.data.conftest import CHATML, tokenizer
from tests.unit.data.test_turn_link import TOOLS

__all__ = ["tokenizer"]
LIMITS = TalkLimits(max_new_tokens=200, max_length=1000, temperature=0.0, seed=3)


@pytest.fixture
def events() -> Iterator[EventLoop]:
    loop = EventLoop("rollouts")
    yield loop
    loop.close()


class ScriptedTexts:
    """Dispatcher that samples texts in order and notes the prompts.

    An exception in place of a text is raised by the wait.
    """

    def __init__(self, events: EventLoop, chat: Chat, *texts: str | BaseException) -> None:
        self.events = events
        self.chat = chat
        self.texts = list(texts)
        self.prompts: list[list[int]] = []
        self.aborted: list[RequestId] = []
        self.pending: BaseException | None = None

    async def sample_turn(self, request: TurnRequest, *, ahead: bool = False, turns_follow: bool = False) -> Completion:
        self.prompts.append(request.prompt_tokens)
        text = self.texts.pop(0)
        if isinstance(text, BaseException):
            self.pending = text
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.aborted.append(request.id)
                raise
        assert isinstance(text, str)
        tokens = np.array(self.chat.encode(text)[: request.max_new_tokens], np.int32)
        finish: Any = "stop" if text.endswith("<|im_end|>") else "length"
        return Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), finish)

    def finish(self, rollouts: Any) -> None:
        pass

    def repair(self) -> bool:
        if self.pending:
            raise self.pending
        return False


def test_the_second_prompt_is_the_first_the_sampled_turn_and_what_was_said(tokenizer: Any, events: EventLoop) -> None:
    chat = Chat(tokenizer, CHATML, "be brief")
    dispatcher = ScriptedTexts(events, chat, "hello<|im_end|>", "cut in", "bye<|im_end|>")
    talk = Talk(chat, dispatcher, LIMITS, talk_id(0))
    assert [message["content"] for message in talk.say("hi")] == ["hello"]
    (cut,) = talk.say("more")
    assert cut == {"role": "assistant", "content": "cut in", "cut": True}
    list(talk.say("end"))
    texts = [tokenizer.decode(prompt) for prompt in dispatcher.prompts]
    assert texts[1].startswith(texts[0] + "hello<|im_end|>\n<|im_start|>user\nmore<|im_end|>")
    # A turn that was cut is closed.
    assert texts[2].startswith(texts[1] + "cut in<|im_end|>\n<|im_start|>user\nend")
    assert dispatcher.prompts[2][: len(dispatcher.prompts[1])] == dispatcher.prompts[1]
    assert talk.length == len(dispatcher.prompts[2]) + len(chat.encode("bye<|im_end|>"))


def test_tools_answer_until_the_policy_does(tokenizer: Any) -> None:
    chat = Chat(tokenizer, TOOLS, None)
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "6 * 7"}}\n</tool_call><|im_end|>'
    with EnvironmentPool({"own": EnvironmentSpec("calculator", 5.0)}, 1024, 1) as pool:
        contract = pool.contracts()["own"]
        tools = TalkTools(pool, contract, "hermes")
        talk = Talk(chat, ScriptedTexts(pool.events, chat, call, "it is 42<|im_end|>"), LIMITS, talk_id(0), tools)
        pool.reset(talk_id(0), {"expression": "1 + 1"}, 0).result()
        messages = [(message["role"], message["content"]) for message in talk.say("6 times 7?")]
    assert messages[1:] == [("tool", "42"), ("assistant", "it is 42")]
    assert messages[0][0] == "assistant"


def test_an_interrupt_stops_the_turn_and_the_talk_goes_on_without_it(tokenizer: Any, events: EventLoop) -> None:
    chat = Chat(tokenizer, CHATML, None)
    dispatcher = ScriptedTexts(events, chat, "one<|im_end|>", KeyboardInterrupt(), "two<|im_end|>")
    talk = Talk(chat, dispatcher, LIMITS, talk_id(0))
    list(talk.say("a"))
    with pytest.raises(KeyboardInterrupt):
        list(talk.say("lost"))
    assert [request_id.turn for request_id in dispatcher.aborted] == [1]
    dispatcher.pending = None
    assert [message["content"] for message in talk.say("b")] == ["two"]
    assert "lost" not in tokenizer.decode(dispatcher.prompts[2])


def test_an_interrupt_of_the_first_turn_keeps_what_the_conversation_begins_with(
    tokenizer: Any, events: EventLoop
) -> None:
    chat = Chat(tokenizer, CHATML, None)
    dispatcher = ScriptedTexts(events, chat, KeyboardInterrupt(), "two<|im_end|>")
    talk = Talk(chat, dispatcher, LIMITS, talk_id(0), opening=[{"role": "user", "content": "the task"}])
    with pytest.raises(KeyboardInterrupt):
        list(talk.say("lost"))
    dispatcher.pending = None
    list(talk.say("b"))
    text = tokenizer.decode(dispatcher.prompts[1])
    assert "the task" in text and "lost" not in text


def test_a_conversation_without_room_says_how_to_begin_another(tokenizer: Any, events: EventLoop) -> None:
    chat = Chat(tokenizer, CHATML, None)
    talk = Talk(chat, ScriptedTexts(events, chat), TalkLimits(10, 20, 0.0, 0), talk_id(0))
    with pytest.raises(TalkError, match=r"would have \d+ tokens of 20: begin another with /new"):
        list(talk.say("word " * 30))
