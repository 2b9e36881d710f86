"""Columns of a row: nested ones by dotted names, and the names that other tools use.

`reward_model.ground_truth` is the key ground_truth in the column reward_model, as verl writes it; `choices.0` is the
first of a list. A column whose own name has a dot comes first.
"""

from collections.abc import Mapping
from typing import Any

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


# Columns of JSON schemas of functions, the first that holds some is shown to the model; others' names for `tools`.
TOOL_COLUMNS = ("tools", "tool_defs", "functions")
# Column of arguments of the chat template.
TEMPLATE_ARGUMENTS = "chat_template_kwargs"


def chat_columns(section: DatasetSection) -> tuple[str, ...]:
    """Return the columns of which rlctl makes a chat: messages, tools, and arguments of the template."""
    return (section.messages_key, section.prompt_key, section.answer_key, *TOOL_COLUMNS, TEMPLATE_ARGUMENTS)


def value_at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, also of a nested one; None if there is none."""
    if key in values:
        return values[key]
    found: Any = values
    for name in key.split("."):
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def has_column(values: Mapping[str, Any], key: str) -> bool:
    """Return True if a row has the column, also where its value is null."""
    head, _, name = key.rpartition(".")
    parent = value_at(values, head) if head else values
    return key in values or value_at(values, key) is not None or (isinstance(parent, Mapping) and name in parent)


def convention(values: Mapping[str, Any], section: str = "") -> str:
    """Return the convention of a row's columns, with the keys that mend the config; empty if it is not known.

    section: the key that these keys are in, such as data.train.
    """
    for names, whose, keys in _CONVENTIONS:
        if all(has_column(values, name) for name in names):
            settings = "set " * bool(keys) + " ".join(f"{section}.{key}".lstrip(".") for key in keys)
            return f"; {': '.join(filter(None, (whose, settings)))}"
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
