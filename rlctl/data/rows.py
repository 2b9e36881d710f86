"""Contents of a row: the messages to answer or to imitate, and the answer. Everything is checked, nothing tokenized.

Answers are text. A number is written in decimal notation without trailing zeros (42 and 42.0 are `42`, 0.50 is `0.5`),
so that `exact` and `regex` can match it. True and false are written as in JSON.
"""

import json
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from rlctl.config.data_schema import DatasetSection
from rlctl.config.errors import did_you_mean
from rlctl.data.datasets import Row
from rlctl.data.files import DataError
from rlctl.data.nested_columns import SHAREGPT_ROLES, convention, has_column, value_at
from rlctl.data.row_columns import refuse_media, system_text
from rlctl.utils.user_code import shorten_text

Messages = list[dict[str, Any]]


def question(
    row: Row, section: DatasetSection, *, needs_answer: bool = False, needs_prompt: bool = True
) -> tuple[Messages, str | None]:
    """Return the messages to answer, and the reference answer: the answer column, else a last assistant message.

    needs_answer: raise DataError if the row has no answer. needs_prompt: raise DataError if the row has no prompt; with
    False such a row has no messages.
    """
    answer = _row_answer(row, section)
    prompts = [value_at(row.values, key) for key in (section.messages_key, section.prompt_key)]
    if needs_prompt:
        refuse_media(row)
    messages: Messages = []
    if needs_prompt or any(prompt is not None for prompt in prompts):
        messages = _row_messages(row, section)
    if messages and messages[-1]["role"] == "assistant":
        answer = messages[-1]["content"] if answer is None else answer
        messages = messages[:-1]
    if not messages and needs_prompt:
        raise DataError(f"{row.origin}: nothing before the assistant's message")
    if needs_answer and answer is None:
        is_chat = value_at(row.values, section.messages_key) is not None
        last = f", and the last message is of {messages[-1]['role']}, not assistant" if is_chat and messages else ""
        raise DataError(f"{row.origin}: no answer to compare with: {_describe_absence(row, section.answer_key)}{last}")
    return messages, answer


def is_chat(row: Row, section: DatasetSection) -> bool:
    """Return True if the prompt of a row is a list of messages, or JSON text of such a list."""
    messages = value_at(row.values, section.messages_key)
    prompt = value_at(row.values, section.prompt_key) if messages is None else messages
    return isinstance(prompt, list) or is_json_chat(row, section)


def conversation(row: Row, section: DatasetSection) -> Messages:
    """Return the chat to imitate: the messages column, or else the prompt and the answer column. Raises DataError."""
    refuse_media(row)
    messages = _row_messages(row, section)
    if value_at(row.values, section.messages_key) is None:
        answer = _row_answer(row, section)
        if answer is None:
            raise DataError(f"{row.origin}: no answer to train on: {_describe_absence(row, section.answer_key)}")
        return [*messages, {"role": "assistant", "content": answer}]
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{row.origin}: no assistant message to train on")
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant" and (problem := wrong_mark(message)):
            raise DataError(f"{row.origin}: message {number}: {problem}")
    return messages


def is_plain(messages: Messages) -> bool:
    """Return True if the roles are (system), user, assistant, user, ... and the first text is not empty.

    Every template takes such a chat.
    """
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    alternates = all(role == ("user", "assistant")[index % 2] for index, role in enumerate(turns))
    return alternates and bool(turns) and bool(messages[0]["content"])


def answer_text(value: Any) -> str | None:
    """Return an answer as text; None stays None. Raises ValueError for neither text nor a finite number."""
    if value is None:
        return None
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float | Decimal) and math.isfinite(value):
        text = format(Decimal(repr(value)) if isinstance(value, float) else value, "f")
        text = text.rstrip("0").rstrip(".") if "." in text else text
        return "0" if text == "-0" else text
    kind = str(value) if isinstance(value, float | Decimal) else f"a {type(value).__name__}"
    raise ValueError(f"must be text or a finite number, not {kind}")


def _row_answer(row: Row, section: DatasetSection) -> str | None:
    try:
        value = value_at(row.values, section.answer_key)
        # TRL's conversational format has a list with the assistant's message.
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
            value = value[0].get("content") if value[0].get("role") == "assistant" else value
        return answer_text(value)
    except ValueError as error:
        raise DataError(f"{row.origin}: answer column {section.answer_key!r} {error}") from None


def has_system(messages: Messages) -> bool:
    """Return True if a chat begins with a message of role `system` or `developer`."""
    return bool(messages) and messages[0]["role"] in ("system", "developer")


def is_json_chat(row: Row, section: DatasetSection) -> bool:
    """Return True if the row's messages are JSON text."""
    messages = value_at(row.values, section.messages_key)
    return _parse_chat(value_at(row.values, section.prompt_key) if messages is None else messages) is not None


def _parse_chat(text: Any) -> list[Any] | None:
    """Return the messages in a text of JSON, as in files of verl and in tables; None for any other value."""
    if not isinstance(text, str) or not text.lstrip().startswith("["):
        return None
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(messages, list) or not messages:
        return None
    return messages if all(_is_message(message) or _is_sharegpt(message) for message in messages) else None


def _row_messages(row: Row, section: DatasetSection) -> Messages:
    """Return the row's chat. If the chat has no system message, the row's system column becomes the first message."""
    messages = _column_messages(row, section)
    text = "" if has_system(messages) else system_text(row)
    return [{"role": "system", "content": text}, *messages] if text else messages


def _column_messages(row: Row, section: DatasetSection) -> Messages:
    """Return the checked messages of the messages column or the prompt column. A prompt text becomes a user message."""
    key = section.messages_key
    messages = value_at(row.values, key)
    if messages is None:
        key = section.prompt_key
        prompt = value_at(row.values, key)
        messages = _parse_chat(prompt) or prompt
        if isinstance(messages, str):
            return [{"role": "user", "content": messages + _alpaca_input(row, section)}]
        if messages is None and has_column(row.values, key):
            raise DataError(f"{row.origin}: column {key!r} is null")
        if messages is None:
            absent = f"no column {key!r} of text, nor {section.messages_key!r}"
            raise DataError(f"{row.origin}: {absent}{_columns_hint(row.values)}{convention(row.values)}")
        if not isinstance(messages, list):
            problem = f"must be text or a list of {{role, content}}, not {_value_text(messages)}"
            raise DataError(f"{row.origin}: column {key!r} {problem}")
    messages = _parse_chat(messages) or messages
    if isinstance(messages, list):
        messages = [_convert_sharegpt(message, row, number) for number, message in enumerate(messages, 1)]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        rule = "must be a list of {role, content} or {from, value}"
        raise DataError(f"{row.origin}: {key!r} {rule}{_describe_misfit(messages)}")
    return [_join_parts(message, row, number) for number, message in enumerate(messages, 1)]


def _alpaca_input(row: Row, section: DatasetSection) -> str:
    """Return a blank line and the column `input` if the prompt is Alpaca's column `instruction`, else an empty text."""
    input_text = row.values.get("input") if section.prompt_key == "instruction" else None
    return f"\n\n{input_text}" if isinstance(input_text, str) and input_text.strip() else ""


def _convert_sharegpt(message: Any, row: Row, number: int) -> Any:
    """Return a ShareGPT message {from, value} as {role, content}. Return any other value unchanged."""
    if not _is_sharegpt(message):
        return message
    role = SHAREGPT_ROLES.get(str(message["from"]))
    if role is None:
        roles = ", ".join(SHAREGPT_ROLES)
        raise DataError(f"{row.origin}: message {number}: from must be one of {roles}, not {message['from']!r}")
    further = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {**further, "role": role, "content": message["value"]}


def _is_sharegpt(message: Any) -> bool:
    return isinstance(message, dict) and {"from", "value"} <= message.keys() and "role" not in message


def _is_message(value: Any) -> bool:
    """Return True for a message with a role, and content or tool calls."""
    return isinstance(value, dict) and "role" in value and ("content" in value or bool(value.get("tool_calls")))


def _describe_misfit(messages: Any) -> str:
    """Return the end of an error text: a description of the wrong value, or of the first wrong message in a list."""
    if not isinstance(messages, list):
        return f", not {_value_text(messages)}"
    for number, message in enumerate(messages, 1):
        if _is_message(message):
            continue
        if not isinstance(message, dict):
            return f", not {_value_text(message)}"
        absent = "content" if "role" in message else "value" if "from" in message else "role"
        return f": message {number} has no {absent}"
    return ", not an empty list"


def _with_calls(message: dict[str, Any], row: Row, number: int) -> dict[str, Any]:
    """Return a message with tool calls in the form for chat templates: content as text, arguments as objects.

    In OpenAI's form the content may be null or missing, and arguments are JSON text, which some templates would write
    as a string.
    """
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            function = {}
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
            problem = "a tool call must have a name, and arguments that are a JSON object or the text of one"
            raise DataError(f"{row.origin}: message {number}: {problem}")
        parsed_function = {**function, "arguments": arguments}
        calls.append({**call, "function": parsed_function} if "function" in call else parsed_function)
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _join_parts(message: dict[str, Any], row: Row, number: int) -> dict[str, Any]:
    """Return a message with its content as text. Text parts are joined, because templates omit or garble parts."""
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            problem = f"tool_calls must be a list of {{name, arguments}}, not {_value_text(calls)}"
            raise DataError(f"{row.origin}: message {number}: {problem}")
        message = _with_calls(message, row, number)
    role = message["role"]
    content = message.get("content")
    if not isinstance(role, str):
        raise DataError(f"{row.origin}: message {number}: role must be text, not {_value_text(role)}")
    if isinstance(content, str):
        return message
    bad_part = content
    if isinstance(content, list):
        bad_parts = [part for part in content if not _is_text(part)]
        if not bad_parts:
            return {**message, "content": "".join(part["text"] for part in content)}
        bad_part = bad_parts[0]
    problem = f"content must be text or a list of {{type: text, text: ...}}, not {_value_text(bad_part)}"
    raise DataError(f"{row.origin}: message {number} ({role}): {problem}")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _value_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str | int | float):
        return f"the {'text' if isinstance(value, str) else 'number'} {shorten_text(repr(value))}"
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        kind = str(value["type"])
        return "a part of type 'text' without text" if kind == "text" else f"a part of type {kind!r}"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _describe_absence(row: Row, key: str) -> str:
    """Return a text that says if a column is null or missing, with a hint at the column that may be meant."""
    if has_column(row.values, key):
        return f"column {key!r} is null"
    hint = convention(row.values) or did_you_mean(key, row.values) or _columns_hint(row.values)
    return f"no column {key!r}{hint}"


def _columns_hint(names: Iterable[str]) -> str:
    return f" (the row has: {', '.join(map(repr, names)) or 'nothing'})"


# Keys of a message that say if its turn is trained (marks): `weight` in OpenAI's format for fine-tuning, `train` in
# Axolotl's, `loss` in ms-swift's, `loss_mask` in verl's.
MARKS = ("weight", "train", "loss", "loss_mask", "trainable")
# Keys that look like a mark.
_LIKE_A_MARK = re.compile(r"train|loss|weight|learn|mask|supervis|grad", re.IGNORECASE)


def is_trained(message: dict[str, Any]) -> bool:
    """Return True unless a mark of the message is false or 0. A mark with null does not count."""
    return all(message.get(mark) is None or bool(message[mark]) for mark in MARKS)


def wrong_mark(message: dict[str, Any]) -> str:
    """Return the problem with a mark that is not 0, 1, false or true; empty if there is none."""
    for mark in MARKS:
        if message.get(mark) not in (None, 0, 1):
            return f"{mark} must be 0 or 1, false or true: a turn is trained as a whole or not at all"
    return ""


def unread_marks(message: dict[str, Any]) -> list[str]:
    """Return the keys of a message that look like a mark, are none, and have the value false or 0."""
    keys = []
    for key, value in message.items():
        is_off = isinstance(value, bool | int | float) and not value
        if is_off and key not in MARKS and _LIKE_A_MARK.search(key):
            keys.append(key)
    return keys
