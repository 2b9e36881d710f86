"""Built-in rewards, each created from its section of the config. Most give 1 for a right answer, else 0."""

import logging
import re
from typing import Any

from rlctl.config.grpo_schema import RewardSection
from rlctl.data.reasoning_gym import COLUMN, Scores, missing_library
from rlctl.rewards.answer_reading import read_reference
from rlctl.rewards.base import RewardError, RewardFunction


def exact(section: RewardSection) -> RewardFunction:
    """Compare the whole completion with the answer. White space at both ends is ignored."""

    def score(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
        return float(completion.strip() == _require_answer(answer).strip())

    return score


def regex(section: RewardSection) -> RewardFunction:
    """Compare the first group of the pattern's first match with the answer. White space at both ends is ignored.

    Raises RewardError unless `pattern` is a regular expression with a group.
    """
    try:
        pattern = re.compile(section.pattern or "")
    except re.error as error:
        raise RewardError(f"bad pattern: {section.pattern!r}: {error}") from error
    if not pattern.groups:
        raise RewardError(f"bad pattern: {section.pattern!r} has no group to compare with the answer")

    def score(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
        match = pattern.search(completion)
        return float(match is not None and (match.group(1) or "").strip() == _require_answer(answer).strip())

    return score


def math_verify(section: RewardSection) -> RewardFunction:
    """Compare the completion's final answer with the reference: a choice, words, or mathematics (library math-verify).

    The library's own timeouts are off, because they use SIGALRM and need the main thread. Instead the scorer ends the
    process that runs this function when the call takes too long.
    """
    # SymPy takes seconds to import.
    from rlctl.rewards.mathematics import is_right

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # without its warning about the timeouts

    def score(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
        answer = _require_answer(answer)
        reference = read_reference(answer)
        if reference is None:
            raise RewardError(f"unreadable answer: {answer!r}")
        return float(is_right(reference, completion, prompt))

    return score


def reasoning_gym(section: RewardSection) -> RewardFunction:
    """Score the completion's answer by the data set that the row comes from (library reasoning-gym).

    Raises RewardError if the library is not installed.
    """
    if missing := missing_library():
        raise RewardError(missing)
    scores = Scores()

    def score(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
        if COLUMN not in row:
            raise RewardError(f"no column {COLUMN}: it scores rows of a path reasoning_gym:NAME alone")
        return scores.score(completion, row)

    return score


def _require_answer(answer: str | None) -> str:
    if answer is None:
        raise RewardError("no answer: the row has none to compare with")
    return answer
