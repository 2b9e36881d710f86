r"""Final answer of a text: the place where a completion or a reference states it. Pure text, milliseconds.

Thinking is cut off first. Then the answer is the text in the last `<answer>`; else the last box; else the last stated
answer, as "The answer is 5." or "#### 5"; else the text itself. `answer_reading.py` reads it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Place = Literal["tag", "box", "statement", "text"]

_NAMES = r"(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning)"
_THINKING = re.compile(rf"[<\[◁](?P<close>/?){_NAMES}[>\]▷]", re.IGNORECASE)
_ANSWER = re.compile(r"<(?P<close>/?)(?:final_)?answer>", re.IGNORECASE)
# Tag at the end of a prompt: the completion is inside it.
_OPENED = re.compile(rf"(?:[<\[◁]{_NAMES}[>\]▷]|<(?:final_)?answer>)\s*\Z", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?P<brace>\{)?")
_UNBRACED = re.compile(r"[^\s$]+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# Text between two boxes that are one answer.
_SEPARATORS = re.compile(r"(?:[\s$,;&.]|\\[()\[\],;:! ]|\\q?quad|\\text\{\s*(?:and|or)?\s*\}|and|or|[a-zA-Z]\s*=)*")
_LIST_WORD = re.compile(r"\b(?:and|or)\b|,|;")
# Characters between the boxes of a list, as the library math-verify has it.
_NEAR_BOX = 10
_FAR_BOX = 70
_MOST_BOXES = 20
_STATEMENT = re.compile(
    r"####|答案\s*(?:[是为：:]|$)"
    r"|\b(?:answers?|correct\s+(?:option|choice|letter))\b[*_\s]*"
    r"(?:\bis\b|\bare\b|[:=]|[^.\n:=]{1,60}?\bis\b|(?=\n))",
    re.IGNORECASE,
)
_BEFORE_STATED = re.compile(r"(?:[\s*_:>=]|as follows)*", re.IGNORECASE)
_DISPLAY = re.compile(r"\$\$.+?\$\$|\\\[.+?\\\]", re.DOTALL)
_MOST_STATEMENTS = 5
# Characters of a stated answer.
_STATED_LENGTH = 300
# Characters of the end of a text that states no answer.
_END_LENGTH = 2_000


@dataclass(frozen=True)
class FinalAnswer:
    """The text of a final answer, and where it was found."""

    text: str
    place: Place


def find_answers(text: str, prompt: str = "", *, is_list: bool = False) -> Iterator[FinalAnswer]:
    """Yield the final answer of `text`; of stated answers the last first, for a later one may state nothing.

    prompt: the text before it, which may have opened the thinking or the answer. is_list: several values are expected,
    so that boxes of one sentence are one answer. Yields nothing where thinking or a box was cut off.
    """
    if opened := _OPENED.search(prompt):
        text = opened[0] + text
    text = cut_thinking(text)
    tagged = _last_tagged(text)
    inside = text if tagged is None else tagged
    boxed = _last_boxed(inside, is_list=is_list)
    if boxed is not None:
        if boxed.strip():
            yield FinalAnswer(boxed.strip(), "box")
        return
    stated = False
    for statement in _last_statements(inside):
        stated = True
        yield FinalAnswer(statement, "statement")
    if tagged is not None:
        if tagged.strip():
            yield FinalAnswer(tagged.strip(), "tag")
    elif not stated and text.strip():
        yield FinalAnswer(text.strip()[-_END_LENGTH:], "text")


def cut_thinking(text: str) -> str:
    """Return the text behind its thinking; without its rest where thinking has no end."""
    opened = None
    start = 0
    for tag in _THINKING.finditer(text):
        if tag["close"]:
            start = tag.end()
            opened = None
        elif opened is None:
            opened = tag.start()
    return text[start:opened]


def _last_tagged(text: str) -> str | None:
    """Return the text in the last `<answer>`, up to the end where nothing closes it; None without one."""
    start = None
    end = len(text)
    for tag in _ANSWER.finditer(text):
        if not tag["close"]:
            start = tag.end()
            end = len(text)
        elif end == len(text):
            end = tag.start()
    return None if start is None else text[start:end]


def _last_boxed(text: str, *, is_list: bool) -> str | None:
    """Return the content of the last box and of its list; empty for an open box, None without one."""
    boxes = list(_BOX.finditer(text))[-_MOST_BOXES:]
    contents: list[str] = []
    outer_start = len(text)
    for box in reversed(boxes):
        end, content = _box_content(text, box)
        if not content:
            if contents:
                break
            return ""
        if end > outer_start:
            # A box around the one before.
            contents[-1] = content
            outer_start = box.start()
            continue
        if contents and not _is_one_answer(text[end:outer_start], is_list=is_list):
            break
        if not contents or contents[-1] != content:
            contents.append(content)
        outer_start = box.start()
    if not boxes:
        return None
    return ",".join(reversed(contents))


def _box_content(text: str, box: re.Match[str]) -> tuple[int, str | None]:
    """Return the end of a box and its content; None where nothing closes it."""
    if not box["brace"]:
        unbraced = _UNBRACED.match(text, box.end())
        return (unbraced.end(), unbraced[0].rstrip(".,")) if unbraced else (box.end(), None)
    depth = 1
    for brace in _BRACE.finditer(text, box.end(), box.end() + _END_LENGTH):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.end(), text[box.end() : brace.start()].strip()
    return len(text), None


def _is_one_answer(between: str, *, is_list: bool) -> bool:
    """Return True if the boxes around `between` are parts of one answer."""
    if len(between) < _NEAR_BOX or (len(between) < _FAR_BOX and _SEPARATORS.fullmatch(between)):
        return True
    return is_list and len(between) < _FAR_BOX and _LIST_WORD.search(between) is not None


def _last_statements(text: str) -> Iterator[str]:
    """Yield the texts behind "the answer is" and the like, the last first: up to the end of a line or a formula."""
    for statement in reversed(list(_STATEMENT.finditer(text))[-_MOST_STATEMENTS:]):
        before = _BEFORE_STATED.match(text, statement.end())
        start = before.end() if before else statement.end()
        formula = _DISPLAY.match(text, start)
        stated = formula[0] if formula else text[start : start + _STATED_LENGTH].partition("\n")[0]
        if stated.strip(" *_"):
            yield stated.strip()
