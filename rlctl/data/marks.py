"""Marks of a message that say if its turn is trained, as the files of other tools have them.

`weight` is of OpenAI's format for fine-tuning, `train` of Axolotl's, `loss` of ms-swift's, `loss_mask` of verl's.
"""

import re
from typing import Any

MARKS = ("weight", "train", "loss", "loss_mask", "trainable")
# Keys that read like a mark.
_LIKE_A_MARK = re.compile(r"train|loss|weight|learn|mask|supervis|grad", re.IGNORECASE)


def is_trained(message: dict[str, Any]) -> bool:
    """Return True unless a mark of the message is false or 0. A mark that is null is none."""
    return all(message.get(mark) is None or bool(message[mark]) for mark in MARKS)


def wrong_mark(message: dict[str, Any]) -> str:
    """Return the problem with a mark that says neither yes nor no; empty if there is none."""
    for mark in MARKS:
        if (value := message.get(mark)) is not None and value not in (0, 1):
            return f"{mark} must be 0 or 1, false or true: a turn is trained as a whole or not at all"
    return ""


def unread_marks(message: dict[str, Any]) -> list[str]:
    """Return the keys that read like a mark, are false or 0, and are none."""
    return [
        key
        for key, value in message.items()
        if key not in MARKS and isinstance(value, bool | int | float) and not value and _LIKE_A_MARK.search(key)
    ]
