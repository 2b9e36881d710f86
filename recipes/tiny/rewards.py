"""A further reward for the tiny sums, next to `exact`."""

from typing import Any


def digits(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
    """Return the share of the answer's digits that are in their place, 0 for an answer of another length."""
    given, wanted = completion.strip(), str(answer)
    return sum(a == b for a, b in zip(given, wanted)) / len(wanted) if len(given) == len(wanted) else 0.0
