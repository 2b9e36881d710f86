"""A reward that grows as a number comes nearer to the right one."""

import re
from typing import Any

FARTHEST = 20


def near(prompt: str, completion: str, answer: str, row: dict[str, Any]) -> float:
    """Return 1 for the right number, less for a number further away, 0 from `FARTHEST` on and without a number."""
    number = re.match(r"\s*(-?\d{1,9})", completion)
    if number is None:
        return 0.0
    distance = abs(int(number[1]) - int(answer))
    return max(0.0, 1 - distance / FARTHEST)
