"""Turns of one session by the messages before them: a request that continues one keeps its sampled tokens.

    request: system, user, assistant', tool      assistant' means the same as turn 0
          -> after turn 0: the tokens of its path, and those of the tool's message

Messages are compared by meaning (`message_key`): clients drop thinking, serialise arguments again, and move marks of
caches. A conversation without a known turn begins a new path.
"""

import ast
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.data.unwritten_messages import UnwrittenMessages
from rlctl.environments.agents.client_request import ClientRequest, RefusedError
from rlctl.environments.agents.client_turn import ClientTurn
from rlctl.environments.contract import Message
from rlctl.environments.tool_schema import Schema
from rlctl.utils.user_code import shortened

# Requests that a new one is compared with, to name the rewritten part.
_COMPARED = 16
# Sets of tools that a process keeps.
_TOOL_SETS = 64
# Characters of new messages, as JSON: they reach the driver in one reply of the process.
MAX_NEW = 2 << 20
# smolagents' words before the calls of a turn, and the most characters of calls to read.
_CALLING, _LONGEST_CALLS = "Calling tools:\n", 1 << 15


def message_key(message: Message) -> str:
    """Return a text that two messages of one meaning share.

    Ids of calls, thinking and the blanks around an assistant's text mean nothing; arguments are compared as JSON. Calls
    mean the same as a list or as text.
    """
    content = message["content"]
    if message["role"] == "assistant":
        functions = [each["function"] for each in message.get("tool_calls", ())]
        text, written = _written_calls(content) if _CALLING in content else (content, [])
        content = [text.strip(), [[each["name"], each["arguments"]] for each in functions] + written]
    return json.dumps([message["role"], content], sort_keys=True, default=str)


@lru_cache(maxsize=512)
def _written_calls(content: str) -> tuple[str, list[list[Any]]]:
    """Return a turn's text and the calls that smolagents wrote behind it.

    Its code agents write the code of the text once more, as a call: that is none.
    """
    text, _, written = content.rpartition(_CALLING)
    try:
        if len(written) > _LONGEST_CALLS:
            raise ValueError("too long")
        functions = [each["function"] for each in ast.literal_eval(written)]
        calls = [[str(each["name"]), each["arguments"]] for each in functions]
        json.dumps(calls, sort_keys=True)
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        return content, []
    return text, [[name, given] for name, given in calls if not (isinstance(given, str) and _has_lines(text, given))]


def _has_lines(text: str, code: str) -> bool:
    return all(line.strip() in text for line in code.splitlines())


def said_message(said: ClientTurn, content: str | None = None) -> Message:
    """Return the message that a client sends back for a turn."""
    calls = [{"function": {"name": each.name, "arguments": each.arguments}} for each in said.calls]
    return {"role": "assistant", "content": said.content if content is None else content, "tool_calls": calls}


@dataclass(frozen=True)
class KnownTurn:
    """One sampled turn and its conversation."""

    number: int
    # All messages up to the turn, which is the last one, as the template is given them.
    messages: list[Message]
    # Tokens of its path, and of the turn itself.
    length: int
    tokens: list[int]


@dataclass(frozen=True)
class PlacedRequest:
    """Place of a request among the turns of its session."""

    # Number of the turn that it continues; None for a new conversation.
    after: int | None
    # Tokens that follow the turn's, and the length of the whole prompt.
    tokens: list[int]
    length: int
    # Tools, and all messages as the template is given them, and the number of new ones.
    tools: list[Schema]
    messages: list[Message]
    fresh: int
    # Chained hash of the messages.
    chain: bytes
    # Reason why no row goes on although the session has turns; empty if it goes on.
    rewritten: str
    # Control tokens that the messages spell.
    spelled: list[str]
    # Roles of new messages that the chat template leaves out.
    unwritten: list[str]
    # Key of each message, with the schemas of the tools and the template's arguments in front.
    keys: list[str]


class ToolSets:
    """Tools of all sessions of a process, which nearly always are the same: each set is one object.

    unwritten: trials of the template, which the sessions share too.
    """

    def __init__(self) -> None:
        self.unwritten = UnwrittenMessages()
        self._known: dict[str, tuple[str, list[Schema]]] = {}

    def one(self, tools: list[Schema]) -> tuple[str, list[Schema]]:
        """Return the key of a set (equal in meaning, equal key), and the first object that was equal to it."""
        raw = json.dumps(tools)
        if (known := self._known.get(raw)) is None:
            known = json.dumps(tools, sort_keys=True), tools
            if len(self._known) < _TOOL_SETS:
                self._known[raw] = known
        return known


class SessionHistory:
    """Turns of one session. tools: those of all sessions."""

    def __init__(self, chat: Chat, tools: ToolSets) -> None:
        self.chat = chat
        self._tools = tools
        self._turns: dict[bytes, KnownTurn] = {}
        # `PlacedRequest.keys` of earlier requests.
        self._requests: list[list[str]] = []
        # Keys and messages, each once: each request brings them again.
        self._keys: dict[str, str] = {}
        self._messages: dict[str, Message] = {}

    def place(self, asked: ClientRequest) -> PlacedRequest:
        """Find the turn that a request continues, and render the messages behind it.

        Raises RefusedError for messages that the template refuses.
        """
        key, tools = self._tools.one(asked.tools)
        unknown = self.chat.unknown_kwargs(asked.template_kwargs)
        arguments = {name: value for name, value in asked.template_kwargs.items() if name not in unknown}
        chat = self.chat.with_kwargs(arguments)
        key += json.dumps(arguments, sort_keys=True) if arguments else ""
        keys = [key, *map(message_key, asked.messages)]
        keys = [self._keys.get(key, key) for key in keys]
        chains = [b""]
        for key in keys:
            chains.append(_chained(chains[-1], key))
        # chains[k + 1] is that of the tools and the first k messages.
        matched = next((k for k in range(len(asked.messages), 0, -1) if chains[k + 1] in self._turns), 0)
        turn = self._turns[chains[matched + 1]] if matched else None
        added = asked.messages[matched:]
        if (length := sum(map(len, keys[matched + 1 if turn else 0 :]))) > MAX_NEW:
            raise RefusedError(f"the new messages have {length:,} characters as JSON, and at most {MAX_NEW:,} are read")
        tokens = self._following(chat, turn, added, tools) if turn else self._opening(chat, added, tools)
        common, nearest = self._nearest_request(keys)
        rewritten = ""
        if self._turns and (turn is None or any(each["role"] == "assistant" for each in added)):
            rewritten = _difference(keys, nearest, common)
        fresh = len(added) if turn else max(1, len(keys) - max(common, 1))
        return PlacedRequest(
            after=turn.number if turn else None,
            tokens=tokens,
            length=len(tokens) + (turn.length if turn else 0),
            tools=tools,
            messages=[*(turn.messages if turn else ()), *added],
            fresh=min(fresh, len(asked.messages)),
            chain=chains[-1],
            rewritten=rewritten,
            spelled=self.chat.find_spelled(added, () if turn else tools),
            unwritten=self._tools.unwritten.find_roles(chat, added, tools, follows_turn=turn is not None),
            keys=keys,
        )

    def note(self, place: PlacedRequest) -> None:
        """Remember a request, to tell later how another one differs from it."""
        self._keys.update(zip(place.keys, place.keys))
        self._requests = self._requests[1 - _COMPARED :]
        self._requests.append(place.keys)

    def shared(self, asked: ClientRequest, place: PlacedRequest) -> ClientRequest:
        """Return a request with the objects of earlier ones in place of equal messages and tools."""
        known = [self._messages.setdefault(key, message) for key, message in zip(place.keys[1:], asked.messages)]
        messages = [a if a == b else b for a, b in zip(known, asked.messages)]
        return replace(asked, messages=messages, tools=place.tools)

    def add(self, placement: PlacedRequest, said: ClientTurn) -> None:
        """Add a turn that was sampled at a place."""
        message = {"role": "assistant", "content": said.text}
        length = placement.length + len(said.tokens)
        known = KnownTurn(said.number, [*placement.messages, message], length, said.tokens)
        # Some clients put back the text at which they have turns cut, also where this turn was not.
        for content in {said.content, *(said.content + stop for stop in said.asked.stop)}:
            self._turns[_chained(placement.chain, message_key(said_message(said, content)))] = known

    def _opening(self, chat: Chat, messages: list[Message], tools: list[Schema]) -> list[int]:
        return self._rendered(lambda given: chat.prompt(given, tools).tokens, messages)

    def _following(self, chat: Chat, turn: KnownTurn, added: list[Message], tools: list[Schema]) -> list[int]:
        """Return the tokens between a turn and the next one."""
        stops = frozenset(chat.ends.stops)
        count = len(turn.messages) - 1

        def render(given: list[Message]) -> list[int]:
            return chat.link(given[:count], given[count:], tools).tokens_after(turn.tokens, stops)

        # A second system message may stand before the turn, another behind it.
        return self._rendered(render, [*turn.messages[:-1], *added])

    def _rendered(self, render: Any, messages: list[Message]) -> list[int]:
        """Return the tokens of messages. A template that takes one system message gets later ones as the user's."""
        for given in (messages, _without_later_systems(messages)):
            try:
                tokens: list[int] = render(given)
                return tokens
            except DataError as error:
                reason = str(error)
            except Exception as error:  # any error of a template, or of a tokenizer that refuses the text
                reason = f"the chat template refuses the messages: {type(error).__name__}: {error}"
        raise RefusedError(shortened(reason))

    def _nearest_request(self, keys: list[str]) -> tuple[int, list[str]]:
        """Return how many first keys an earlier request shares, and that request."""
        best: tuple[int, list[str]] = 0, []
        for each in reversed(self._requests):
            common = next((k for k, (a, b) in enumerate(zip(keys, each)) if a != b), min(len(keys), len(each)))
            if common > best[0] or not best[1]:
                best = common, each
        return best


def _chained(before: bytes, key: str) -> bytes:
    return blake2b(before + key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _without_later_systems(messages: list[Message]) -> list[Message]:
    return [
        {**each, "role": "user"} if each["role"] == "system" and index else each for index, each in enumerate(messages)
    ]


def _difference(keys: list[str], nearest: list[str], common: int) -> str:
    """Return in words where a request leaves the nearest earlier one. keys: tools first, then the messages."""
    if common == 0:
        return "the tools or the arguments of the chat template are others"
    if common >= len(keys):
        return "an earlier request came again"
    role, content = json.loads(keys[common])
    name = f"message {common - 1} ({role})"
    if common >= len(nearest):
        return f"{name} is not the turn that was sampled there" if role == "assistant" else f"{name} is new"
    before_role, before = json.loads(nearest[common])
    if role != before_role:
        return f"{name} is in the place of one of role {before_role}"
    if role == "assistant":
        parts = [what for what, a, b in zip(("content", "tool_calls"), content, before) if a != b]
        return f"{name} has other {' and '.join(parts)}"
    return f"{name} has another content"
