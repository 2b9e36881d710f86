"""Environment of higher or lower: guess a number within a range. A game without tools, for models of any size.

With 15 numbers and 5 guesses, blind guesses win 29% of the games, random guesses within the hints 80%, and halving the
range 100%.
"""

import random
import re
from collections.abc import Iterator
from typing import Any

_PROMPT = "I am thinking of a number from {low} to {high}. You have {guesses} guesses. Answer with one number."


class Guess:
    """One game. guesses: number of guesses that the model has. prompt, higher, lower, unclear: texts for the model."""

    def __init__(
        self,
        guesses: int = 5,
        prompt: str = _PROMPT,
        higher: str = "higher",
        lower: str = "lower",
        unclear: str = "Answer with one number.",
    ) -> None:
        self._guesses = guesses
        self._prompt = prompt
        self._higher = higher
        self._lower = lower
        self._unclear = unclear

    def reset(self, low: int = 1, high: int = 15, secret: int | None = None, **row: Any) -> str:
        """Begin a game. The secret is drawn unless the row has one."""
        self._secret = random.randint(low, high) if secret is None else secret
        self._guesses_left = self._guesses
        self._is_won = False
        return self._prompt.format(low=low, high=high, guesses=self._guesses)

    def step(self, message: str) -> str | None:
        """Judge a guess, the last number of the message; return a hint, or None at the end of the game.

        A message without a number uses up a guess too.
        """
        self._guesses_left -= 1
        # At most 18 digits, because Python refuses to convert a text of thousands of digits.
        numbers = re.findall(r"-?\d{1,18}", message)
        self._is_won = bool(numbers) and int(numbers[-1]) == self._secret
        if self._is_won or self._guesses_left <= 0:
            return None
        if not numbers:
            return self._unclear
        return self._higher if int(numbers[-1]) < self._secret else self._lower

    def get_reward(self) -> float:
        """Return 1 for a game that was won, else 0."""
        return float(self._is_won)


def tasks(seed: int, held_out: bool = False, numbers: int = 15, highest: int = 99) -> Iterator[dict[str, Any]]:
    """Yield random rows without end. Held-out rows and training rows have no range in common.

    held_out: yield only ranges that begin at a multiple of 5. False yields only the others. numbers: size of a range.
    """
    draw = random.Random(seed)
    all_lows = range(1, highest - numbers + 2)
    lows = [low for low in all_lows if (low % 5 == 0) == held_out]
    while True:
        low = draw.choice(lows)
        yield {"low": low, "high": low + numbers - 1, "secret": draw.randint(low, low + numbers - 1)}
