"""1 if the completion is the answer, white space around either aside; else 0."""

from typing import Any

from rlctl.rewards.base import require_answer


def score(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
    return float(completion.strip() == require_answer(answer).strip())
