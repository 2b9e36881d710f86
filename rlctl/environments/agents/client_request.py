"""A client's request for a turn in one form for all APIs, and the error of a refused request.

An API's adapter reads a request into a `ClientRequest`. Parameters that would change the policy's sampling distribution
are counted or refused, see `Parameters`.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlctl.environments.contract import Message
from rlctl.environments.tool_schema import Schema

# Parameters that the run's `generation` decides, because the trained log-probs are those of its distribution.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class RefusedError(Exception):
    """A request that gets no turn. status: HTTP status, never 409, 429 or 5xx, which make clients retry."""

    def __init__(self, text: str, status: int = 400, kind: str = "invalid_request_error") -> None:
        super().__init__(text)
        self.text = text
        self.status = status
        self.kind = kind


@dataclass
class ClientRequest:
    """One request of a client for a turn of the policy."""

    # Name of the model, which the answer repeats.
    model: str
    # Conversation. Each message has role, content as text, and if sent `tool_calls` (arguments as a dict) and
    # `tool_call_id`.
    messages: list[Message]
    tools: list[Schema]
    # Most tokens of the turn; None means the run's limit.
    max_tokens: int | None = None
    # Stop strings: the turn is cut before the first of these texts.
    stop: list[str] = field(default_factory=list)
    # Arguments of the chat template, such as enable_thinking.
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    # False if no text of the turn may be read as a tool call.
    may_call: bool = True
    stream: bool = False
    # Bytes of the request's body, plus those of the earlier requests of its conversation if it has a `previous_id`.
    size: int = 0
    # Values of keys that change only the form of the answer, for example `logprobs`.
    form: dict[str, Any] = field(default_factory=dict)
    # Id of the turn whose conversation the messages continue; empty if the messages are the whole conversation.
    previous_id: str = ""
    # Names of the parameters that were not honoured, for example `overridden/temperature`.
    counted: list[str] = field(default_factory=list)


@dataclass
class Parameters:
    """Unread keys of a request's body. An API's adapter takes the keys that it knows."""

    body: dict[str, Any]
    # Names of the parameters that were not honoured.
    counted: list[str] = field(default_factory=list)

    def take(self, key: str, kind: type | tuple[type, ...] = object, otherwise: Any = None) -> Any:
        """Remove a key and return its value; return `otherwise` if it is missing or null.

        Raises RefusedError if the value is not of type `kind`.
        """
        value = self.body.pop(key, None)
        if value is None:
            return otherwise
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join(allowed.__name__ for allowed in kinds)
            raise RefusedError(f"{key} must be of type {names}, not {type(value).__name__}")
        return value

    def take_template_kwargs(self) -> dict[str, Any]:
        """Remove and return the chat template's arguments, from the key that vLLM's APIs use. Raises RefusedError."""
        arguments: dict[str, Any] = self.take("chat_template_kwargs", dict, {})
        return arguments

    def ignore(self, keys: Collection[str]) -> None:
        """Remove keys that ask for no change of the policy's turn."""
        for key in keys:
            self.body.pop(key, None)

    def override(self) -> None:
        """Remove and count the sampling parameters, which the run decides."""
        self._count_keys("overridden", SAMPLING)

    def leave_unenforced(self, keys: Collection[str]) -> None:
        """Remove and count parameters that need constrained decoding. It samples from another distribution."""
        self._count_keys("unenforced", keys)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Raise RefusedError if a key of `reasons` is set."""
        for key, reason in reasons.items():
            if self.body.pop(key, None):
                raise RefusedError(f"{key}: {reason}")

    def count_rest(self) -> list[str]:
        """Remove and count the remaining keys; return the names of all parameters that were not honoured."""
        # A metric's name will contain the key, so only short names count. Any text can be a key of the client's JSON.
        self._count_keys("ignored", [key for key in self.body if key.isidentifier() and len(key) <= 40])
        return self.counted

    def _count_keys(self, how: str, keys: Collection[str]) -> None:
        self.counted += [f"{how}/{key}" for key in keys if self.body.pop(key, None) is not None]


def text_of(content: Any, kinds: Collection[str] = ("text", "input_text", "output_text")) -> str:
    """Return the text of a message's content, which is text, null or a list of text parts. Raises RefusedError."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if (kind not in kinds and kind != "refusal") or not isinstance(text, str):
            raise RefusedError(f"content must be text or parts of text; this policy reads no {kind}")
        texts.append(text)
    return "".join(texts)


def whole_number(text: str) -> int | None:
    """Return the number in a text of digits; None for other text."""
    return int(text) if text.isdecimal() else None


def function_schema(function: Any) -> Schema:
    """Return a client's function as a tool schema. A missing description or parameters become empty.

    Raises RefusedError for a function without a name.
    """
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError("tools: each must be a function with a name")
    parameters = function.get("parameters")
    parameters = dict(parameters) if isinstance(parameters, dict) else {}
    if not isinstance(parameters.get("properties"), dict):
        parameters["properties"] = {}
    schema = {
        "name": function["name"],
        "description": str(function.get("description") or ""),
        "parameters": {"type": "object", **parameters},
    }
    return {"type": "function", "function": schema}


def read_call(name: Any, arguments: Any, call_id: Any) -> dict[str, Any]:
    """Return a tool call of an earlier turn in the form for chat templates. arguments: JSON text, or an object."""
    if isinstance(arguments, str):
        # Text that is no JSON stays text, and the template writes it unchanged.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return {"id": str(call_id or ""), "type": "function", "function": {"name": str(name), "arguments": arguments}}


def check_messages(messages: list[Message]) -> list[Message]:
    """Return the messages. Raises RefusedError if there are none or the last one is the assistant's."""
    if not messages:
        raise RefusedError("messages: there are none")
    if messages[-1]["role"] == "assistant":
        raise RefusedError("messages: the last one is the assistant's; this policy continues no begun turn")
    return messages
