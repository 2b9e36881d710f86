"""Outputs and values that count as equal."""

import pytest

from rlctl.rewards.programs.inside.compare import is_same_output, is_same_value


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("3\n", "3", True),
        ("  1 2 \n3\n\n", "1 2\n3", True),
        ("1  2", "1 2", True),
        ("1\n2", "1 2", False),
        ("1.0", "1", True),
        ("0.3333333", "0.3333333333", True),
        ("0.3334", "0.3333", False),
        ("1000000", "1000001", False),
        ("1e3", "1000", True),
        ("Yes", "YES", False),
        ("nan", "nan", True),
        ("9" * 5000, "8" * 5000, False),
        ("", "", True),
    ],
)
def test_outputs(output, expected, same):
    assert is_same_output(output, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ((1, 2), [1, 2], True),
        ([[1], (2,)], [[1], [2]], True),
        (0.1 + 0.2, 0.3, True),
        (3, 3.0, True),
        ("3", 3, False),
        ({1: "a"}, {"1": "a"}, True),
        (None, None, True),
        ([1, 2], [2, 1], False),
        (10**400, 1.5, False),
    ],
)
def test_values(value, expected, same):
    assert is_same_value(value, expected) is same
