"""Environment of arithmetic: the tool `calculate` computes, and the tool `answer` takes the policy's final answer."""

import ast
import operator
import random
from collections.abc import Iterator
from typing import Any

_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
# Most characters of an expression.
_LONGEST = 200
# Largest absolute value of a number, intermediate results included.
_LARGEST = 1e10


class Calculator:
    """One episode: the policy computes one arithmetic expression."""

    def reset(self, expression: str, **row: Any) -> str:
        """Begin an episode with the expression of a row; return the user's message."""
        self._right_answer = compute(expression)
        self._answer: float | None = None
        return f"Compute {expression}. Use the tool calculate, then give the result to the tool answer."

    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers, brackets and the operators + - * / // %.

        Returns:
            The result.
        """
        return f"{compute(expression):.10g}"

    def answer(self, value: float) -> str:
        """Give the final answer.

        Args:
            value: The number that was asked for.

        Returns:
            A confirmation.
        """
        self._answer = float(value)
        return "Thank you."

    def get_reward(self) -> float:
        """Return 1 if the last answer is right, else 0."""
        if self._answer is None:
            return 0.0
        tolerance = 1e-6 * max(1.0, abs(self._right_answer))
        return float(abs(self._answer - self._right_answer) <= tolerance)


def compute(expression: str) -> float:
    """Return the value of an arithmetic expression. No other Python code runs. Raises ValueError with the reason."""
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression may have at most {_LONGEST} characters")
    try:
        return _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _evaluate(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        number: float = node.value  # type: ignore[assignment]
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        number = _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        number = _OPERATORS[type(node.op)](_evaluate(node.operand))
    else:
        raise ValueError("only numbers, brackets and + - * / // % are allowed")
    if abs(number) > _LARGEST:
        raise ValueError("a number is too large")
    return number


def tasks(seed: int, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Yield random rows without end. Held-out rows and training rows have no expression in common.

    held_out: yield only expressions whose first number is a multiple of 5. False yields only the others.
    """
    draw = random.Random(seed)
    while True:
        numbers = [draw.randint(2, 99) for _ in range(draw.randint(2, 3))]
        is_held_out = numbers[0] % 5 == 0
        if is_held_out == held_out:
            further_terms = (f" {draw.choice('+-*')} {number}" for number in numbers[1:])
            yield {"expression": f"{numbers[0]}{''.join(further_terms)}"}
