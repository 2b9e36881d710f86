"""Turn of the policy, as its client reads it: text, thinking, tool calls, and the sampled tokens."""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Literal

from rlctl.data.chat import Chat
from rlctl.environments.agents.client_request import ClientRequest
from rlctl.environments.messages import AgentTurn
from rlctl.environments.tool_calls import split_turn
from rlctl.environments.tool_formats import ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class NumberedCall:
    """A tool call with its id, which the message with the tool's result repeats."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ClientTurn:
    """One sampled turn, cut at the client's first stop string."""

    request: ClientRequest
    # Number of the request in its session.
    number: int
    id: str
    # Number of tokens of the prompt.
    prompt_length: int
    # Sampled tokens up to the cut, and the log-prob of each.
    tokens: list[int]
    log_probs: list[float]
    # Text of the tokens without the token that ended the turn.
    text: str
    # Text of the thinking.
    reasoning: str
    # Text outside of thinking and calls.
    content: str
    calls: list[NumberedCall]
    # Number of malformed calls.
    malformed: int
    finish: FinishReason
    # Stop string at which the turn was cut; empty if it was not cut.
    stop: str
    chat: Chat
    created: int = field(default_factory=lambda: int(time.time()))

    def token_texts(self) -> list[str]:
        """Return the text of each token."""
        return [self.chat.decode([token]) for token in self.tokens]


def read_turn(
    request: ClientRequest,
    number: int,
    session: str,
    prompt_length: int,
    sampled: AgentTurn,
    chat: Chat,
    tool_format: str | None,
) -> ClientTurn:
    """Return a sampled turn as its client gets it: cut at the request's stop strings, with its calls parsed.

    session: id of the session. tool_format: format of the tool calls; None if no text is a call.
    """
    tokens = sampled.tokens
    log_probs = sampled.log_probs
    finish = sampled.finish
    text = chat.turn_text(tokens)
    visible_text = text
    stop = ""
    cut = find_cut(chat, tokens, text, request.stop)
    if cut is not None:
        # The kept tokens contain the stop string. The client reads the text before this string.
        length, stop = cut
        tokens = tokens[:length]
        log_probs = log_probs[:length]
        finish = "stop"
        text = chat.decode(tokens)
        visible_text = text[: text.index(stop)]
    turn = split_turn(visible_text, tool_format if request.may_call and request.tools else None, request.tools)
    formed = [call for call in turn.calls if isinstance(call, ToolCall)]
    malformed = len(turn.calls) - len(formed)
    calls: list[NumberedCall] = []
    # If one call is malformed, the agent gets all calls as text, as they were sampled.
    if not malformed:
        for index, call in enumerate(formed):
            # Nine letters and digits: Mistral's template takes no other ids.
            call_id = f"c{number:05d}{index:03d}"
            calls.append(NumberedCall(call_id, call.name, call.arguments))
    return ClientTurn(
        request=request,
        number=number,
        id=f"{session}-{number}",
        prompt_length=prompt_length,
        tokens=tokens,
        log_probs=log_probs,
        text=text,
        reasoning=turn.reasoning,
        content=turn.visible_text if malformed else turn.content,
        calls=calls,
        malformed=malformed,
        finish="tool_calls" if calls else "length" if finish == "length" else "stop",
        stop=stop,
        chat=chat,
    )


def find_cut(chat: Chat, tokens: Sequence[int], text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return the length of the shortest prefix of `tokens` with a stop string in its text, and the string.

    Return None if the text has no stop string.
    """

    def has_stop(stop: str, end: int) -> bool:
        return stop in chat.decode(tokens[: end + 1])

    cuts = []
    for stop in stops:
        if stop in text:
            # Bisection, because each longer prefix contains the string too.
            length = bisect_left(range(len(tokens)), True, key=partial(has_stop, stop)) + 1
            cuts.append((length, text.index(stop), stop))
    if not cuts:
        return None
    length, _, stop = min(cuts, key=itemgetter(0, 1))
    # At most all tokens: a tokenizer may decode a prefix otherwise than the whole, and bisection may find none then.
    return min(length, len(tokens)), stop
