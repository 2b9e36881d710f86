"""Problems of one task, and the two tools of the agents in this folder. It imports nothing of rlctl.

A row has one `expression`, or several `expressions` that are posed one after another in one conversation.
"""

import ast
import operator

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Problems:
    """Problems of one task."""

    def __init__(self, row):
        self.expressions = row.get("expressions") or [row["expression"]]
        self.right = 0
        self.answered = False

    def prompts(self):
        """Yield the prompt of each problem."""
        for expression in self.expressions:
            self.expression, self.answered = expression, False
            yield f"Compute {expression}. Use the tool calculate, then give the result to the tool answer."

    def answer(self, value: float) -> str:
        """Give the answer.

        Args:
            value: The result.
        """
        if not self.answered:
            self.answered = True
            self.right += abs(float(value) - value_of(self.expression)) < 1e-6
        return "Thank you."

    def calculate(self, expression: str) -> str:
        """Compute.

        Args:
            expression: Numbers and + - *.
        """
        try:
            return f"{value_of(expression):.10g}"
        except (ValueError, SyntaxError) as error:
            return f"Error: {error}"

    def reward(self):
        """Return the share of the problems whose first answer was right."""
        return self.right / len(self.expressions)


def value_of(expression):
    """Return the value of an arithmetic expression. Raises ValueError, SyntaxError."""

    def of(node):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](of(node.left), of(node.right))
        raise ValueError("only numbers and + - * are allowed")

    return of(ast.parse(str(expression).strip(), mode="eval").body)
