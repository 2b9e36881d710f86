"""Text from models and users, made safe to print on a terminal.

A terminal obeys control characters: a completion could move the cursor, retitle the window or fill the clipboard.
"""

import re

# Control characters except tab and line feed, the C1 range, marks that change a line's direction, lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_PICTURES = 0x2400
_DELETE = 0x2421


def neutral(text: str) -> str:
    """Return `text` with each character that a terminal would obey replaced by one visible character."""
    return _UNSAFE.sub(_picture, text)


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    return chr(_DELETE) if code == 0x7F else "\ufffd"
