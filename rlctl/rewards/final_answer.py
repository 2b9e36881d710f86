r"""Search for the final answer in a completion or in a reference answer. Pure text; takes milliseconds.

Thinking is cut off first. Then the answer is looked for in the last `<answer>`, or in the whole text if there is none.
It is the last box; else the last statement, such as "The answer is 5." or "#### 5"; else the text itself.
`answer_reading.py` reads the answer.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Place = Literal["tag", "box", "statement", "text"]

_NAMES = r"(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning)"
_THINKING = re.compile(rf"[<\[◁](?P<close>/?){_NAMES}[>\]▷]", re.IGNORECASE)
_ANSWER = re.compile(r"<(?P<close>/?)(?:final_)?answer>", re.IGNORECASE)
# Opening tag at the end of a prompt, so that the completion begins inside the tag.
_OPENED = re.compile(rf"(?:[<\[◁]{_NAMES}[>\]▷]|<(?:final_)?answer>)\s*\Z", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?P<brace>\{)?")
_UNBRACED = re.compile(r"[^\s$]+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# Text that may stand between two boxes of one answer.
_SEPARATORS = re.compile(r"(?:[\s$,;&.]|\\[()\[\],;:! ]|\\q?quad|\\text\{\s*(?:and|or)?\s*\}|and|or|[a-zA-Z]\s*=)*")
_LIST_WORD = re.compile(r"\b(?:and|or)\b|,|;")
# Most characters between two boxes of one answer, as in math-verify: with any text between, and with separators only.
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
# Most characters of a stated answer.
_STATED_LENGTH = 300
# Number of last characters that are the answer of a text without a box, tag or statement. Longest content of a box.
_END_LENGTH = 2_000


@dataclass(frozen=True)
class FinalAnswer:
    """The text of a final answer, and where it was found."""

    text: str
    place: Place


def find_answers(text: str, prompt: str = "", *, is_list: bool = False) -> Iterator[FinalAnswer]:
    """Yield the candidates for the final answer of `text`, the best first.

    Statements come from the last to the first, because the last one may give no answer. prompt: the text before `text`,
    which may end with an opening tag of thinking or answer. is_list: several values are expected, so boxes of one
    sentence are one answer. Yields nothing if `text` ends within its thinking or within a box.
    """
    # A prompt may end with an opening tag. The completion then begins inside this tag.
    if opened := _OPENED.search(prompt):
        text = opened[0] + text
    text = cut_thinking(text)
    tagged = _last_tagged(text)
    searched_text = text if tagged is None else tagged
    boxed = _last_boxed(searched_text, is_list=is_list)
    if boxed is not None:
        if boxed.strip():
            yield FinalAnswer(boxed.strip(), "box")
        return
    has_statement = False
    for statement in _last_statements(searched_text):
        has_statement = True
        yield FinalAnswer(statement, "statement")
    if tagged is not None:
        if tagged.strip():
            yield FinalAnswer(tagged.strip(), "tag")
    elif not has_statement and text.strip():
        yield FinalAnswer(text.strip()[-_END_LENGTH:], "text")


def cut_thinking(text: str) -> str:
    """Return the text behind the last closed thinking, up to thinking that is not closed."""
    start = 0
    # Position of the first opening tag behind `start`; None if there is none.
    end = None
    for tag in _THINKING.finditer(text):
        if tag["close"]:
            start = tag.end()
            end = None
        elif end is None:
            end = tag.start()
    return text[start:end]


def _last_tagged(text: str) -> str | None:
    """Return the text in the last `<answer>`, up to the text's end if it is not closed; None without the tag."""
    start = None
    end = len(text)
    for tag in _ANSWER.finditer(text):
        if not tag["close"]:
            start = tag.end()
            end = len(text)
        elif end == len(text):  # the first closing tag behind the opening one
            end = tag.start()
    return None if start is None else text[start:end]


def _last_boxed(text: str, *, is_list: bool) -> str | None:
    """Return the content of the last box, joined with earlier boxes of the same answer by commas.

    Return an empty text if the last box is not closed, and None if there is no box.
    """
    boxes = list(_BOX.finditer(text))[-_MOST_BOXES:]
    # Contents of the boxes of the answer, the last one first.
    contents: list[str] = []
    # Start of the box that was read before, which stands behind this one or inside of it.
    later_start = len(text)
    for box in reversed(boxes):
        end, content = _box_content(text, box)
        if not content:
            # An earlier box without content ends the answer. If the last box has none, there is no answer.
            if contents:
                break
            return ""
        if end > later_start:
            # This box encloses the box that was read before.
            contents[-1] = content
            later_start = box.start()
            continue
        if contents and not _is_one_answer(text[end:later_start], is_list=is_list):
            break
        if not contents or contents[-1] != content:
            contents.append(content)
        later_start = box.start()
    if not boxes:
        return None
    return ",".join(reversed(contents))


def _box_content(text: str, box: re.Match[str]) -> tuple[int, str | None]:
    """Return the position behind a box, and its content; the content is None if the box is not closed."""
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
    """Return True if two boxes with the text `between` between them are parts of one answer."""
    if len(between) < _NEAR_BOX or (len(between) < _FAR_BOX and _SEPARATORS.fullmatch(between)):
        return True
    return is_list and len(between) < _FAR_BOX and _LIST_WORD.search(between) is not None


def _last_statements(text: str) -> Iterator[str]:
    """Yield the text behind each phrase such as "the answer is", the last first.

    The text ends with its line, or with its displayed formula.
    """
    for statement in reversed(list(_STATEMENT.finditer(text))[-_MOST_STATEMENTS:]):
        before = _BEFORE_STATED.match(text, statement.end())
        start = before.end() if before else statement.end()
        formula = _DISPLAY.match(text, start)
        stated = formula[0] if formula else text[start : start + _STATED_LENGTH].partition("\n")[0]
        if stated.strip(" *_"):
            yield stated.strip()
