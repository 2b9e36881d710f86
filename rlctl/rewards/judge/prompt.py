"""The question to a judge: a text with placeholders, which are filled in once.

A value is never searched for placeholders, so an answer that contains `{answer}` stays as it is. Braces around other
text stay too.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlctl.config.errors import did_you_mean
from rlctl.rewards.base import RewardError, RewardInput

Compare = Literal["pairs", "group"] | None
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*(?:\.[^{}]+)?)\}")
# Begin of a placeholder for a column of the data set's row.
_COLUMN = "row."
# A short hash of the question. A prompt that has it makes the judge repeat it, so that a server which swaps its replies
# is found out.
TICKET = "ticket"
_SHARED = ("prompt", "answer", "criteria", TICKET)
_ANSWERS: dict[Compare, tuple[str, ...]] = {
    None: ("completion", "last_turn"),
    "pairs": ("first", "second"),
    "group": ("completions", "count"),
}


@dataclass(frozen=True)
class Question:
    """A question to a judge."""

    text: str
    # The reply must have this text, if it is not empty.
    ticket: str = ""


def placeholder_problem(template: str, compare: Compare) -> str:
    """Return the problem of a prompt file: no answer in it, or a misspelled placeholder; "" if there is none."""
    names = set(_PLACEHOLDER.findall(template))
    known = (*_SHARED, *_ANSWERS[compare])
    for name in sorted(names - set(known)):
        hint = did_you_mean(name, known)
        if hint and not name.startswith(_COLUMN):
            return f"has no placeholder {{{name}}}{hint}"
    answers = _ANSWERS[compare]
    if compare == "pairs" and not names.issuperset(answers):
        return "must have {first} and {second}, the answers to compare"
    if not names.intersection(answers):
        return f"must have {{{answers[0]}}}, the text to judge"
    return ""


def make_question(template: str, compare: Compare, items: Sequence[RewardInput], criteria: Sequence[str]) -> Question:
    """Return the question about rollouts of one task: one, the two of a pair, or all of the group.

    Raises RewardError if the template names a column or an answer that the row does not have.
    """
    item = items[0]
    values = {"prompt": item.prompt, "criteria": "\n".join(f"- {name}" for name in criteria)}
    if compare == "pairs":
        values |= {"first": items[0].completion, "second": items[1].completion}
    elif compare == "group":
        numbered = [f"[{number}]\n{each.completion}" for number, each in enumerate(items, 1)]
        values |= {"completions": "\n\n".join(numbered), "count": str(len(items))}
    else:
        last_turn = item.completion if item.last_turn is None else item.last_turn
        values |= {"completion": item.completion, "last_turn": last_turn}
    names = set(_PLACEHOLDER.findall(template))
    if "answer" in names:
        if item.answer is None:
            raise RewardError("no answer: the row has none for the placeholder {answer}")
        values["answer"] = item.answer
    for name in names:
        if name.startswith(_COLUMN):
            values[name] = _column_text(item.row, name.removeprefix(_COLUMN))
    text = _fill_in(template, values)
    if TICKET not in names:
        return Question(text)
    ticket = hashlib.blake2b(text.encode(errors="replace"), digest_size=4).hexdigest()
    return Question(_fill_in(template, {**values, TICKET: ticket}), ticket)


def _fill_in(template: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)


def _column_text(row: Mapping[str, object], column: str) -> str:
    if column not in row:
        raise RewardError(f"no column {column}: the prompt of the judge names it, and the row has {', '.join(row)}")
    value = row[column]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
