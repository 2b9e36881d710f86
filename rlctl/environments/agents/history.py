"""History of one session: finds the turn that a request continues. The turn then keeps its sampled tokens.

    request: system, user, assistant', tool      assistant' means the same as turn 0
          -> continues turn 0: the tokens up to turn 0, then the tokens of the tool's message

Messages are compared by meaning (`message_key`), because clients drop thinking, serialise arguments in another way, and
move cache marks. A conversation without a known turn begins a new sequence of tokens.
"""

import ast
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.data.unwritten_messages import UnwrittenMessages
from rlctl.environments.agents.client_request import ClientRequest, RefusedError
from rlctl.environments.agents.client_turn import ClientTurn
from rlctl.environments.contract import Message
from rlctl.environments.tool_schema import Schema
from rlctl.utils.user_code import shorten_text

# Number of last requests that a new request is compared with, to name the message that the client rewrote.
_COMPARED = 16
# Most sets of tools that a process keeps.
_TOOL_SETS = 64
# Most characters of a request's new messages as JSON, because they reach the driver in one reply of the process.
MAX_NEW = 2 << 20
# Words that smolagents writes before the calls of a turn.
_CALLING = "Calling tools:\n"
# Most characters of such calls that are read.
_LONGEST_CALLS = 1 << 15


def message_key(message: Message) -> str:
    """Return a text that is equal for two messages with the same meaning.

    The key leaves out call ids, thinking, and the blanks around an assistant's text. Arguments are compared as JSON.
    Calls in the field `tool_calls` equal the same calls written out in the content.
    """
    content = message["content"]
    if message["role"] == "assistant":
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [[function["name"], function["arguments"]] for function in functions]
        text, written_calls = _read_written_calls(content) if _CALLING in content else (content, [])
        content = [text.strip(), calls + written_calls]
    return json.dumps([message["role"], content], sort_keys=True, default=str)


@lru_cache(maxsize=512)
def _read_written_calls(content: str) -> tuple[str, list[list[Any]]]:
    """Return a turn's text, and smolagents' calls behind it. A call that only repeats code of the text is left out."""
    text, _, written = content.rpartition(_CALLING)
    try:
        if len(written) > _LONGEST_CALLS:
            raise ValueError("too long")
        functions = [call["function"] for call in ast.literal_eval(written)]
        calls = [[str(function["name"]), function["arguments"]] for function in functions]
        json.dumps(calls, sort_keys=True)
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        return content, []
    new_calls = []
    for name, arguments in calls:
        if not (isinstance(arguments, str) and _has_lines(text, arguments)):
            new_calls.append([name, arguments])
    return text, new_calls


def _has_lines(text: str, code: str) -> bool:
    return all(line.strip() in text for line in code.splitlines())


def turn_message(turn: ClientTurn, content: str | None = None) -> Message:
    """Return the message that a client sends back for a turn."""
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in turn.calls]
    return {"role": "assistant", "content": turn.content if content is None else content, "tool_calls": calls}


@dataclass(frozen=True)
class KnownTurn:
    """One sampled turn and its conversation."""

    number: int
    # All messages up to the turn, which is the last one, as the chat template gets them.
    messages: list[Message]
    # Number of tokens of the conversation, the turn included.
    length: int
    # Sampled tokens of the turn.
    tokens: list[int]


@dataclass(frozen=True)
class PlacedRequest:
    """Place of a request among the turns of its session."""

    # Number of the turn that the request continues; None for a new conversation.
    after: int | None
    # Tokens of the prompt behind that turn (all tokens for a new conversation), and length of the whole prompt.
    tokens: list[int]
    length: int
    tools: list[Schema]
    # All messages, as the chat template gets them.
    messages: list[Message]
    # Number of messages at the end that no earlier request had.
    new_count: int
    # Chained hash of the tools and all messages.
    chain: bytes
    # Reason why the request continues no turn although the session has turns; empty if it continues one.
    rewritten: str
    # Control tokens that the messages' texts spell out.
    spelled: list[str]
    # Roles of the new messages that the chat template leaves out.
    unwritten: list[str]
    # First the key of the tools and the template's arguments, then the key of each message.
    keys: list[str]


class ToolSets:
    """Sets of tools, shared by all sessions of a process. Equal sets, which are the usual case, become one object."""

    def __init__(self) -> None:
        # Finds messages that the chat template leaves out.
        self.unwritten = UnwrittenMessages()
        self._sets: dict[str, tuple[str, list[Schema]]] = {}

    def share_set(self, tools: list[Schema]) -> tuple[str, list[Schema]]:
        """Return a set's key, equal for any order of the JSON keys, and the first object that was equal to the set."""
        text = json.dumps(tools)
        if text in self._sets:
            return self._sets[text]
        keyed_set = (json.dumps(tools, sort_keys=True), tools)
        if len(self._sets) < _TOOL_SETS:
            self._sets[text] = keyed_set
        return keyed_set


class SessionHistory:
    """Turns of one session. tools: sets of tools that all sessions share."""

    def __init__(self, chat: Chat, tools: ToolSets) -> None:
        self.chat = chat
        self._tools = tools
        # By the chained hash of the tools and of all messages up to the turn.
        self._turns: dict[bytes, KnownTurn] = {}
        # `PlacedRequest.keys` of the last requests.
        self._requests: list[list[str]] = []
        # One object for each key and message, because each request repeats the earlier ones.
        self._keys: dict[str, str] = {}
        self._messages: dict[str, Message] = {}

    def place(self, request: ClientRequest) -> PlacedRequest:
        """Find the turn that a request continues, and encode the messages behind it.

        Raises RefusedError for messages that the chat template refuses.
        """
        tools_key, tools = self._tools.share_set(request.tools)
        unknown = self.chat.unknown_kwargs(request.template_kwargs)
        arguments = {name: value for name, value in request.template_kwargs.items() if name not in unknown}
        chat = self.chat.with_kwargs(arguments)
        if arguments:
            tools_key += json.dumps(arguments, sort_keys=True)
        new_keys = [tools_key, *map(message_key, request.messages)]
        # Equal keys of earlier requests are used again, to save memory.
        keys = [self._keys.get(key, key) for key in new_keys]
        chains = [b""]
        for key in keys:
            chains.append(_chain_hash(chains[-1], key))
        # chains[count + 1] is the hash of the tools and the first `count` messages. The last known turn is continued.
        known_count = len(request.messages)
        while known_count and chains[known_count + 1] not in self._turns:
            known_count -= 1
        turn = self._turns[chains[known_count + 1]] if known_count else None
        added = request.messages[known_count:]
        added_keys = keys[known_count + 1 :] if turn else keys
        if (length := sum(map(len, added_keys))) > MAX_NEW:
            raise RefusedError(f"the new messages have {length:,} characters as JSON, and at most {MAX_NEW:,} are read")
        tokens = self._following_tokens(chat, turn, added, tools) if turn else self._opening_tokens(chat, added, tools)
        num_shared, nearest_keys = self._nearest_request(keys)
        rewritten = ""
        # Each assistant's message should be a turn of this session, so one behind the known turn was rewritten.
        if self._turns and (turn is None or any(message["role"] == "assistant" for message in added)):
            rewritten = _describe_difference(keys, nearest_keys, num_shared)
        # keys[0] is of the tools. At least 1 for a repeated request, because `keys[-0:]` would be all keys.
        new_count = len(added) if turn else max(1, len(keys) - max(num_shared, 1))
        return PlacedRequest(
            after=turn.number if turn else None,
            tokens=tokens,
            length=len(tokens) + (turn.length if turn else 0),
            tools=tools,
            messages=turn.messages + added if turn else added,
            new_count=min(new_count, len(request.messages)),
            chain=chains[-1],
            rewritten=rewritten,
            spelled=self.chat.find_spelled(added, () if turn else tools),
            unwritten=self._tools.unwritten.find_roles(chat, added, tools, follows_turn=turn is not None),
            keys=keys,
        )

    def note(self, place: PlacedRequest) -> None:
        """Remember a request, to describe later how another request differs from it."""
        self._keys.update(zip(place.keys, place.keys))
        self._requests = self._requests[1 - _COMPARED :]
        self._requests.append(place.keys)

    def share_objects(self, request: ClientRequest, place: PlacedRequest) -> ClientRequest:
        """Return a request in which equal messages and tools are the objects of earlier requests, to save memory."""
        messages = []
        for key, message in zip(place.keys[1:], request.messages):
            first_message = self._messages.setdefault(key, message)
            messages.append(first_message if first_message == message else message)
        return replace(request, messages=messages, tools=place.tools)

    def add(self, place: PlacedRequest, turn: ClientTurn) -> None:
        """Add the turn that was sampled for a request, so that a later request can continue it."""
        known_turn = KnownTurn(
            number=turn.number,
            messages=[*place.messages, {"role": "assistant", "content": turn.text}],
            length=place.length + len(turn.tokens),
            tokens=turn.tokens,
        )
        # Some clients append a stop string to the text, even if the turn was not cut at it.
        for stop in ("", *turn.request.stop):
            message = turn_message(turn, turn.content + stop)
            self._turns[_chain_hash(place.chain, message_key(message))] = known_turn

    def _opening_tokens(self, chat: Chat, messages: list[Message], tools: list[Schema]) -> list[int]:
        return self._render(lambda variant: chat.prompt(variant, tools).tokens, messages)

    def _following_tokens(self, chat: Chat, turn: KnownTurn, added: list[Message], tools: list[Schema]) -> list[int]:
        """Return the tokens between a turn and the next turn: those of the added messages."""
        stops = frozenset(chat.ends.stops)
        # Number of messages before the turn, whose own message is the last one.
        count = len(turn.messages) - 1

        def render(messages: list[Message]) -> list[int]:
            return chat.link(messages[:count], messages[count:], tools).tokens_after(turn.tokens, stops)

        # All messages together, because `_render` must change every system message but the first.
        return self._render(render, [*turn.messages[:-1], *added])

    def _render(self, render: Any, messages: list[Message]) -> list[int]:
        """Return the tokens of messages. If a template takes one system message only, later ones become the user's."""
        later_messages = [
            {**message, "role": "user"} if message["role"] == "system" else message for message in messages[1:]
        ]
        for variant in (messages, [*messages[:1], *later_messages]):
            try:
                tokens: list[int] = render(variant)
                return tokens
            except DataError as error:
                reason = str(error)
            except Exception as error:  # any error of a template, or of a tokenizer that refuses the text
                reason = f"the chat template refuses the messages: {type(error).__name__}: {error}"
        raise RefusedError(shorten_text(reason))

    def _nearest_request(self, keys: list[str]) -> tuple[int, list[str]]:
        """Find the earlier request that shares most first keys; return the number of shared keys, and its keys."""
        most_common = 0
        nearest: list[str] = []
        for request_keys in reversed(self._requests):
            matches = takewhile(lambda pair: pair[0] == pair[1], zip(keys, request_keys))
            common = sum(1 for _ in matches)
            if common > most_common or not nearest:
                most_common = common
                nearest = request_keys
        return most_common, nearest


def _chain_hash(chain: bytes, key: str) -> bytes:
    return blake2b(chain + key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _describe_difference(keys: list[str], nearest: list[str], common: int) -> str:
    """Describe where a request first differs from its nearest earlier request, after `common` equal first keys."""
    if common == 0:
        return "the tools or the arguments of the chat template are others"
    if common >= len(keys):
        return "an earlier request came again"
    role, content = json.loads(keys[common])
    name = f"message {common - 1} ({role})"
    if common >= len(nearest):
        return f"{name} is not the turn that was sampled there" if role == "assistant" else f"{name} is new"
    earlier_role, earlier_content = json.loads(nearest[common])
    if role != earlier_role:
        return f"{name} is in the place of one of role {earlier_role}"
    if role == "assistant":
        text, calls = content
        earlier_text, earlier_calls = earlier_content
        parts = []
        if text != earlier_text:
            parts.append("content")
        if calls != earlier_calls:
            parts.append("tool_calls")
        return f"{name} has other {' and '.join(parts)}"
    return f"{name} has another content"
