"""Comparison of a program's output and values with the expected ones. Uses the standard library alone."""

from decimal import Decimal, InvalidOperation
from typing import Any

# Largest relative and absolute difference of two equal numbers. Two integers must be the same.
TOLERANCE = 1e-6


def is_same_output(output: str, expected: str) -> bool:
    """Compare lines as LiveCodeBench does: white space at both ends of a line and of the text is left out.

    A line of numbers is equal if its numbers are. LiveCodeBench asks for equal decimals; here 0.333333 is a third.
    """
    lines = output.strip().split("\n")
    expected_lines = expected.strip().split("\n")
    if len(lines) != len(expected_lines):
        return False
    return all(_is_same_line(line.strip(), other.strip()) for line, other in zip(lines, expected_lines))


def is_same_value(answer: Any, expected: Any) -> bool:
    """Compare a function's value with the expected one, which was JSON: a tuple is a list."""
    if isinstance(answer, list | tuple) and isinstance(expected, list | tuple):
        return len(answer) == len(expected) and all(map(is_same_value, answer, expected))
    if isinstance(answer, dict) and isinstance(expected, dict):
        # The keys of JSON are texts.
        texts = {str(key): member for key, member in answer.items()}
        expected_texts = {str(key): member for key, member in expected.items()}
        return texts.keys() == expected_texts.keys() and all(
            is_same_value(member, expected_texts[key]) for key, member in texts.items()
        )
    if isinstance(answer, float) or isinstance(expected, float):
        is_number = all(type(side) in (int, float) for side in (answer, expected))
        return is_number and _is_close(answer, expected)
    return type(answer) in _PLAIN and bool(answer == expected)


_PLAIN = (type(None), bool, int, str, list, tuple, dict, set, frozenset, bytes)


def _is_same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    words = line.split()
    expected_words = expected.split()
    if len(words) != len(expected_words):
        return False
    return all(word == other or _is_same_number(word, other) for word, other in zip(words, expected_words))


def _is_same_number(word: str, expected: str) -> bool:
    # A number of thousands of digits would take long to compare.
    if max(len(word), len(expected)) > 400:
        return False
    try:
        number = Decimal(word)
        expected_number = Decimal(expected)
    except InvalidOperation:
        return False
    if number == expected_number:
        return True
    has_fraction = "." in expected or "e" in expected.lower()
    return has_fraction and _is_close(float(number), float(expected_number))


def _is_close(answer: float, expected: float) -> bool:
    try:
        return answer == expected or abs(answer - expected) <= TOLERANCE * max(1.0, abs(expected))
    except OverflowError:
        return False
