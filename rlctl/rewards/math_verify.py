"""1 if the completion's final answer equals the reference mathematically (library math-verify); else 0.

The library's own timeouts use SIGALRM and so need a main thread; they are off here, because the worker process
that runs this is killed from outside when it takes too long.
"""

import logging
from typing import Any

from math_verify import parse, verify

from rlctl.rewards.base import RewardError, require_answer

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off


def score(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
    answer = require_answer(answer)
    # A bare answer such as x^2+1 is no LaTeX to the parser until something says so.
    marked = answer if "\\boxed" in answer or "$" in answer else f"\\boxed{{{answer}}}"
    gold = parse(marked, parsing_timeout=None)
    if not gold:
        raise RewardError(f"unreadable answer: {answer!r}")
    return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))
