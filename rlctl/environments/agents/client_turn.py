"""Turn of the policy, as its client reads it: text, thinking, tool calls, and the tokens behind them."""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from rlctl.data.chat import Chat
from rlctl.environments.agents.client_request import ClientRequest
from rlctl.environments.messages import AgentTurn
from rlctl.environments.tool_calls import split_turn
from rlctl.environments.tool_formats import ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class NumberedCall:
    """A tool call with the id that its result names."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ClientTurn:
    """One sampled turn, up to the text at which the client cut it."""

    asked: ClientRequest
    # Number of the request in its session.
    number: int
    id: str
    prompt_length: int
    # Sampled tokens that are left, and the log-prob of each.
    tokens: list[int]
    log_probs: list[float]
    # Text of the tokens without the one that ended the turn.
    text: str
    # Thinking, and the text outside of thinking and calls.
    reasoning: str
    content: str
    calls: list[NumberedCall]
    malformed: int
    finish: FinishReason
    # Text at which the turn was cut; empty if it was not.
    cut_at: str
    chat: Chat
    created: int = field(default_factory=lambda: int(time.time()))

    def token_texts(self) -> list[str]:
        """Return the text of each token."""
        return [self.chat.decode([token]) for token in self.tokens]


def read_turn(
    asked: ClientRequest,
    number: int,
    session: str,
    prompt_length: int,
    sampled: AgentTurn,
    chat: Chat,
    tool_format: str | None,
) -> ClientTurn:
    """Read a sampled turn."""
    tokens = sampled.tokens
    log_probs = sampled.log_probs
    finish = sampled.finish
    text, cut_at = chat.turn_text(tokens), ""
    if (at := find_cut(chat, tokens, text, asked.stop)) is not None:
        length, cut_at = at
        tokens, log_probs, finish = tokens[:length], log_probs[:length], "stop"
        text = chat.decode(tokens)
    shown = text[: text.index(cut_at)] if cut_at else text
    turn = split_turn(shown, tool_format if asked.calls and asked.tools else None, asked.tools)
    formed = [each for each in turn.calls if isinstance(each, ToolCall)]
    malformed = len(turn.calls) - len(formed)
    # One call that cannot be read makes text of the whole turn: the agent sees it as it was said.
    called = [] if malformed else formed
    # Nine letters and digits: Mistral's template takes no other ids.
    calls = [NumberedCall(f"c{number:05d}{index:03d}", each.name, each.arguments) for index, each in enumerate(called)]
    return ClientTurn(
        asked=asked,
        number=number,
        id=f"{session}-{number}",
        prompt_length=prompt_length,
        tokens=tokens,
        log_probs=log_probs,
        text=text,
        reasoning=turn.reasoning,
        content=turn.said if malformed else turn.content,
        calls=calls,
        malformed=malformed,
        finish="tool_calls" if calls else "length" if finish == "length" else "stop",
        cut_at=cut_at,
        chat=chat,
    )


def find_cut(chat: Chat, tokens: Sequence[int], text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return the length of the shortest prefix of `tokens` with a stop in its text, and this stop; None without one."""
    found = [stop for stop in stops if stop in text]
    if not found:
        return None

    def has(stop: str, end: int) -> bool:
        return stop in chat.decode(tokens[: end + 1])

    lengths = {stop: bisect_left(range(len(tokens)), True, key=partial(has, stop)) + 1 for stop in found}
    stop = min(found, key=lambda each: (lengths[each], text.index(each)))
    return min(lengths[stop], len(tokens)), stop
