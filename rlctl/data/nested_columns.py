"""Columns of a row: nested ones by dotted names, and the names that other tools use.

`reward_model.ground_truth` is the key ground_truth in the column reward_model, as verl writes it; `choices.0` is the
first of a list. A column whose own name has a dot comes first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlctl.config.data_schema import DatasetSection

# Names of a chat's roles in ShareGPT's convention.
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
    """A column that tools for training give a meaning."""

    name: str
    # tools, system and template are read, the first usable one of a kind; refused is an error; ignored is said.
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
    """Return the names of the known columns of these uses, in their order."""
    return [column.name for column in KNOWN_COLUMNS if column.use in uses]


def chat_columns(section: DatasetSection) -> tuple[str, ...]:
    """Return the columns of which rlctl makes a chat: messages, tools, and arguments of the template."""
    return (section.messages_key, section.prompt_key, section.answer_key, *columns_of("tools", "template"))


def is_empty(value: Any) -> bool:
    """Return True for null, an empty text and an empty list or object."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def value_at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, also of a nested one; None if there is none."""
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
    """Return True if a row has the column, also where its value is null."""
    head, _, name = key.rpartition(".")
    parent = value_at(values, head) if head else values
    return key in values or value_at(values, key) is not None or (isinstance(parent, Mapping) and name in parent)


def convention(values: Mapping[str, Any], section: str = "") -> str:
    """Return the convention of a row's columns, with the keys that mend the config; empty if it is not known.

    section: the key that these keys are in, such as data.train.
    """
    for names, owner, keys in _CONVENTIONS:
        if all(has_column(values, name) for name in names):
            settings = [f"{section}.{key}".lstrip(".") for key in keys]
            remedy = f"set {' '.join(settings)}" if keys else ""
            return f"; {': '.join(filter(None, (owner, remedy)))}"
    return ""


# (columns, their convention, keys that read them), the most telling first.
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
