"""Endpoint in this process, with a script in place of the driver: any client may call."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlctl.data.chat import Chat
from rlctl.environments.agents.agent_session import AgentSession
from rlctl.environments.agents.endpoint import Endpoint
from rlctl.environments.messages import AgentTurn

# ChatML with tools and their calls.
TOOLED = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = "<|im_end|>"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def call(a: int, b: int, before: str = "") -> str:
    """A turn that calls `add`."""
    return f"{before}<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': a, 'b': b}})}</tool_call>{END}"


@dataclass
class Served:
    """A session whose turns `says` gives: a text, a budget (`max_turns`), or None: no answer for now.

    It has the driver's tree: each request's whole prompt, and the turns that the agent got. delay: seconds of a turn.
    shared: an endpoint of several sessions.
    """

    chat: Chat
    says: Callable[[int], str | None]
    tool_format: str | None = "hermes"
    bind: str = "127.0.0.1"
    delay: Callable[[], float] = lambda: 0.0
    shared: Endpoint | None = None
    # Prompt of each request, as tokens; what was sampled, and the number of tokens that are kept.
    prompts: list[list[int]] = field(default_factory=list)
    sampled: dict[int, list[int]] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
    asks: list[dict[str, Any]] = field(default_factory=list)
    news: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.endpoint = self.shared or Endpoint(self.bind)
        self.session = AgentSession(self.chat, self.tool_format, self._look)
        self.call(lambda: self.endpoint.open(self.session))

    @property
    def url(self) -> str:
        return self.endpoint.url(self.session)

    @property
    def key(self) -> str:
        return self.session.secret

    def call(self, function: Callable[[], Any]) -> Any:
        """Do something on the endpoint's event loop."""

        async def do() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(do(), self.endpoint.loop).result(10)

    def settle(self) -> None:
        """Take the news that are there."""
        self.call(self._look)

    def answer(self, number: int, text: str) -> None:
        """Give a turn that was held back."""
        self.call(lambda: self._give(number, text))

    def texts(self) -> list[str]:
        """Prompts as text."""
        return [self.chat.decode(each) for each in self.prompts]

    def _look(self) -> None:
        waits = self.session.take_requests()
        for number, length in waits.delivered:
            assert number not in self.kept
            self.kept[number] = length
        for ask in waits.asks:
            before = [] if ask.after is None else self._path(ask.after)
            self.asks.append(ask)
            self.prompts.append([*before, *ask.tokens])
            if (text := self.says(ask.number)) is not None:
                asyncio.get_running_loop().call_later(self.delay(), self._give, ask.number, text)
        self.news.set()

    def _path(self, number: int) -> list[int]:
        return [*self.prompts[number], *self.sampled[number][: self.kept[number]]]

    def _give(self, number: int, text: str) -> None:
        if text in ("max_turns", "max_length", "time"):
            self.session.answer(number, text)
            return
        tokens = self.sampled[number] = self.chat.encode(text)
        finish = "stop" if tokens and tokens[-1] in self.chat.ends.stops else "length"
        self.session.answer(number, AgentTurn(tokens, [-0.5] * len(tokens), finish))


def script(*texts: str | None) -> Callable[[int], str | None]:
    """Return turns by the number of their request."""
    given: Sequence[str | None] = texts
    return lambda number: given[number]
