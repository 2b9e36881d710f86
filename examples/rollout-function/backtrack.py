"""A rollout function: a wrong answer is rewound to its first token, and finished once more."""

from typing import Any

from tokenizers import Tokenizer

from rlctl.config.builtin import RECIPES

TOKENIZER = Tokenizer.from_file(str(RECIPES / "tiny/qwen3-tiny/tokenizer.json"))


async def play(task: Any, policy: Any) -> float:
    """Answer at most twice. Return 1 if the first answer is right, 0.5 if the second one is, else 0."""
    first = await policy.sample(task.tokens)
    if is_right(first.tokens, task.answer):
        return 1.0
    # Without the token that ended the answer.
    beginning = first.tokens[:-1][:1]
    second = await policy.sample(task.tokens + beginning)
    return 0.5 if is_right(beginning + second.tokens, task.answer) else 0.0


def is_right(tokens: list[int], answer: str) -> bool:
    """Return True if the text of the tokens is the answer."""
    text: str = TOKENIZER.decode(tokens)
    return text.replace(" ", "") == answer
