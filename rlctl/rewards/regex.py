"""1 if the first group of the pattern's first match is the answer, white space aside; else 0."""

import re
from typing import Any

from rlctl.rewards.base import RewardError, require_answer


def compile_pattern(pattern: str | None) -> re.Pattern[str]:
    """Raises RewardError unless `pattern` is a regular expression with a group."""
    try:
        compiled = re.compile(pattern or "")
    except re.error as error:
        raise RewardError(f"bad pattern: {pattern!r}: {error}") from error
    if not compiled.groups:
        raise RewardError(f"bad pattern: {pattern!r} has no group to compare with the answer")
    return compiled


def score(pattern: re.Pattern[str], prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
    match = pattern.search(completion)
    return float(match is not None and (match.group(1) or "").strip() == require_answer(answer).strip())
