"""Arithmetic with a calculator: its first use is free, each further use costs a little."""

from typing import Any

from rlctl.environments.calculator import compute


class PricedCalculator:
    """One problem. Its tools are the two public methods with a docstring that names each argument."""

    def __init__(self, price: float = 0.1) -> None:
        self._price = price

    def reset(self, expression: str, **row: Any) -> str:
        """Pose the problem of a row."""
        self._expression = expression
        self._answer: float | None = None
        self._uses = 0
        return f"Compute {expression}. Use the tool calculate, then give the result to the tool answer."

    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers and the operators + - *.
        """
        self._uses += 1
        return f"{compute(expression):.10g}"

    def answer(self, value: float) -> str:
        """Give the final answer.

        Args:
            value: The number that was asked for.
        """
        self._answer = value
        return "Thank you."

    def get_reward(self) -> dict[str, float]:
        """Return 1 for a right answer, and the price of the uses apart. The sum decides if a rollout is right, at 1."""
        is_right = self._answer == compute(self._expression)
        return {"right": float(is_right), "price": -self._price * max(0, self._uses - 1)}
