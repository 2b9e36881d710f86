"""The verdicts in a judge's reply.

A reply has a line `NAME: VERDICT` for each name, or a JSON object with the names. Of several lines with a name the last
one counts. A reply about one name may be the verdict alone. A reply without a verdict raises, and is never a 0.
"""

import json
import re
from collections.abc import Mapping, Sequence

from rlctl.rewards.base import RewardError

_NUMBER = re.compile(r"([-+]?\d+(?:\.\d+)?)(?:\s*/\s*([-+]?\d+(?:\.\d+)?))?")
# Characters around a name or a verdict that are markup.
_MARKUP = r"[\s*_`\"'#>(){}\[\]-]*"
PAIR_VERDICTS = {"A": 1.0, "B": 0.0, "tie": 0.5}


def read_verdicts(
    reply: str, names: Sequence[str], words: Mapping[str, float], scale: Sequence[float] | None
) -> dict[str, float]:
    """Return name -> value of each verdict in a reply. words: the allowed verdicts and their values.

    scale: [lowest, highest] if a verdict is a number; these have the values 0 and 1. Raises RewardError.
    """
    texts = _find_json_texts(reply, names) or {name: _find_line_text(reply, name) for name in names}
    if len(names) == 1 and not texts[names[0]]:
        texts = {names[0]: _trim_markup(reply)}
    return {name: _read_verdict(name, text, words, scale) for name, text in texts.items()}


def _find_json_texts(reply: str, names: Sequence[str]) -> dict[str, str]:
    """Return the verdicts of a JSON object in the reply; {} if there is none with every name."""
    try:
        found = json.loads(reply[reply.index("{") : reply.rindex("}") + 1])
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    by_name = {str(name).casefold(): value for name, value in found.items()}
    texts = {name: by_name.get(name.casefold()) for name in names}
    if not all(isinstance(text, str | int | float) for text in texts.values()):
        return {}
    return {name: _trim_markup(str(text)) for name, text in texts.items()}


def _find_line_text(reply: str, name: str) -> str:
    """Return the text behind the last `NAME:` that begins a line; "" if there is none."""
    found = re.findall(rf"(?im)^{_MARKUP}{re.escape(name)}{_MARKUP}[:=](.*)$", reply)
    return _trim_markup(found[-1]) if found else ""


def _trim_markup(text: str) -> str:
    return re.sub(rf"^{_MARKUP}|[\s.!]*{_MARKUP}[.!]*$", "", text)


def _read_verdict(name: str, text: str, words: Mapping[str, float], scale: Sequence[float] | None) -> float:
    if not text:
        raise RewardError(f"no verdict in the judge's reply: no line {name}:")
    if scale is None:
        values = {word.casefold(): value for word, value in words.items()}
        if text.casefold() not in values:
            raise RewardError(f"no verdict in the judge's reply: {name} is {text!r}, not one of {', '.join(words)}")
        return float(values[text.casefold()])
    low, high = scale
    found = _NUMBER.fullmatch(text)
    if found is None or not low <= float(found[1]) <= high or (found[2] and float(found[2]) != high):
        raise RewardError(f"no verdict in the judge's reply: {name} is {text!r}, no number from {low:g} to {high:g}")
    return (float(found[1]) - low) / (high - low)
