"""Columns of a row: nested columns by dotted names, and the column names of other tools.

`reward_model.ground_truth` is the key ground_truth in the column reward_model, as verl writes it. `choices.0` is the
first entry of a list. A column whose name itself has the dot is preferred.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlctl.config.data_schema import DatasetSection

# Role in ShareGPT's convention -> role of a chat.
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class KnownColumn:
    """A column that has a meaning in other training tools."""

    name: str
    # tools, system, template: the first usable column of the kind is read. refused: an error. ignored: a warning.
    use: Literal["tools", "system", "template", "refused", "ignored"]
    meaning: str


KNOWN_COLUMNS = (
    KnownColumn("tools", "tools", "JSON schemas of functions"),
    KnownColumn("tool_defs", "tools", "JSON schemas of functions"),
    KnownColumn("functions", "tools", "JSON schemas of functions"),
    KnownColumn("system", "system", "the text of a system message"),
    KnownColumn("system_prompt", "system", "the text of a system message"),
    KnownColumn("chat_template_kwargs", "template", "arguments of the chat template"),
    KnownColumn("image", "refused", "a picture"),
    KnownColumn("images", "refused", "pictures"),
    KnownColumn("video", "refused", "a film"),
    KnownColumn("videos", "refused", "films"),
    KnownColumn("audio", "refused", "sound"),
    KnownColumn("audios", "refused", "sounds"),
    KnownColumn("history", "ignored", "earlier turns"),
    KnownColumn("documents", "ignored", "documents of the chat template"),
    KnownColumn("input_ids", "ignored", "tokens of another program"),
    KnownColumn("weight", "ignored", "the weight of a row"),
    KnownColumn("rejected_response", "ignored", "an answer to avoid"),
    KnownColumn("rejected_messages", "ignored", "a chat to avoid"),
)


def columns_of(*uses: str) -> list[str]:
    """Return the names of the known columns with one of these uses, in the order of the table."""
    return [column.name for column in KNOWN_COLUMNS if column.use in uses]


def chat_columns(section: DatasetSection) -> tuple[str, ...]:
    """Return the columns from which rlctl builds a chat: messages, prompt, answer, tools, arguments of the template."""
    return (section.messages_key, section.prompt_key, section.answer_key, *columns_of("tools", "template"))


def is_empty(value: Any) -> bool:
    """Return True for null, an empty text and an empty list or object."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def value_at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column or a nested column; None if there is no such column."""
    if key in values:
        return values[key]
    value: Any = values
    for name in key.split("."):
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            value = value.get(name) if isinstance(value, Mapping) else None
    return value


def has_column(values: Mapping[str, Any], key: str) -> bool:
    """Return True if a row has the column, even if its value is null."""
    head, _, name = key.rpartition(".")
    parent = value_at(values, head) if head else values
    return key in values or value_at(values, key) is not None or (isinstance(parent, Mapping) and name in parent)


def convention(values: Mapping[str, Any], section: str = "") -> str:
    """Return the end of an error that names the tool of a row's columns, and the keys to set; empty if unknown.

    section: section of the config that has these keys, such as data.train.
    """
    for names, owner, keys in _CONVENTIONS:
        if all(has_column(values, name) for name in names):
            settings = [f"{section}.{key}".lstrip(".") for key in keys]
            remedy = f"set {' '.join(settings)}" if keys else ""
            return f"; {': '.join(filter(None, (owner, remedy)))}"
    return ""


# (columns, name of their convention, keys that make rlctl read them). The first match counts.
_CONVENTIONS: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("chosen", "rejected"), "these are preferences (DPO, reward models), which rlctl does not train on", ()),
    (("prompt", "reward_model.ground_truth"), "these are verl's columns", ("answer_key=reward_model.ground_truth",)),
    (("conversations",), "these are ShareGPT's columns", ("messages_key=conversations",)),
    (("conversation",), "these are ShareGPT's columns", ("messages_key=conversation",)),
    (("instruction", "output"), "these are Alpaca's columns", ("prompt_key=instruction", "answer_key=output")),
    (("prompt", "completion"), "these are TRL's columns", ("answer_key=completion",)),
    (("prompt", "solution"), "these are TRL's columns", ("answer_key=solution",)),
    (("prompt", "ground_truth"), "these are TRL's columns", ("answer_key=ground_truth",)),
    (("problem", "answer"), "", ("prompt_key=problem",)),
    (("problem", "solution"), "", ("prompt_key=problem", "answer_key=solution")),
    (("question", "answer"), "", ("prompt_key=question",)),
    (("question", "response"), "", ("prompt_key=question", "answer_key=response")),
    (("text",), "whole texts have no prompt and answer, and rlctl does not train on them (language modelling)", ()),
)
