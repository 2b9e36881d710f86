"""The agents' endpoint in this process, with scripted turns instead of a driver. Any client library may call it."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlctl.data.chat import Chat
from rlctl.environments.agents.agent_session import AgentSession
from rlctl.environments.agents.endpoint import Endpoint
from rlctl.environments.messages import AgentAsk, AgentTurn

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


def write_call(a: int, b: int, before: str = "") -> str:
    """Return a turn that calls `add`. before: its text before the call."""
    call = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
    return f"{before}<tool_call>{call}</tool_call>{END}"


@dataclass
class Served:
    """A session whose turns `text_of_turn` gives: a text, a budget (`max_turns`), or None: no answer for now.

    It has the driver's tree: each request's whole prompt, and the turns that the agent got. delay: seconds of a turn.
    shared: an endpoint of several sessions.
    """

    chat: Chat
    text_of_turn: Callable[[int], str | None]
    tool_format: str | None = "hermes"
    bind: str = "127.0.0.1"
    delay: Callable[[], float] = lambda: 0.0
    shared: Endpoint | None = None
    # Prompt of each request, as tokens.
    prompts: list[list[int]] = field(default_factory=list)
    # Tokens of each sampled turn, by the number of its request.
    sampled: dict[int, list[int]] = field(default_factory=dict)
    # Number of these tokens that the agent got, by the number of the request.
    kept_lengths: dict[int, int] = field(default_factory=dict)
    asks: list[AgentAsk] = field(default_factory=list)
    has_requests: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.endpoint = self.shared or Endpoint(self.bind)
        self.session = AgentSession(self.chat, self.tool_format, self._take_requests)
        self.run_on_loop(lambda: self.endpoint.open(self.session))

    @property
    def url(self) -> str:
        return self.endpoint.url(self.session)

    @property
    def key(self) -> str:
        return self.session.secret

    def close(self) -> None:
        self.run_on_loop(lambda: self.endpoint.close(self.session))

    def run_on_loop(self, function: Callable[[], Any]) -> Any:
        """Call a function on the endpoint's event loop."""

        async def call_function() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call_function(), self.endpoint.loop).result(10)

    def settle(self) -> None:
        """Handle the requests and deliveries that the session has received so far."""
        self.run_on_loop(self._take_requests)

    def answer(self, number: int, text: str) -> None:
        """Answer request `number`, which has waited because its scripted turn was None."""
        self.run_on_loop(lambda: self._give_turn(number, text))

    def texts(self) -> list[str]:
        """Return the prompts as text."""
        return [self.chat.decode(prompt) for prompt in self.prompts]

    def _take_requests(self) -> None:
        waits = self.session.take_requests()
        for number, length in waits.delivered:
            assert number not in self.kept_lengths
            self.kept_lengths[number] = length
        for ask in waits.asks:
            earlier_tokens = [] if ask.after is None else self._tokens_up_to(ask.after)
            self.asks.append(ask)
            self.prompts.append([*earlier_tokens, *ask.tokens])
            text = self.text_of_turn(ask.number)
            if text is not None:
                asyncio.get_running_loop().call_later(self.delay(), self._give_turn, ask.number, text)
        self.has_requests.set()

    def _tokens_up_to(self, number: int) -> list[int]:
        return [*self.prompts[number], *self.sampled[number][: self.kept_lengths[number]]]

    def _give_turn(self, number: int, text: str) -> None:
        if text in ("max_turns", "max_length", "time"):
            self.session.take_answer(number, text)
            return
        tokens = self.chat.encode(text)
        self.sampled[number] = tokens
        finish = "stop" if tokens and tokens[-1] in self.chat.ends.stops else "length"
        self.session.take_answer(number, AgentTurn(tokens, [-0.5] * len(tokens), finish))


def script(*texts: str | None) -> Callable[[int], str | None]:
    """Return the function for `text_of_turn`: request `number` gets `texts[number]`."""
    return lambda number: texts[number]
