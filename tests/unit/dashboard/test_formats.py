"""Formatting of numbers, durations and sizes for people."""

import pytest

from rlctl.dashboard.formats import duration, error_factor, number, percent, span


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (12345.6, "12,346"),
        (123.44, "123.4"),
        (200.0, "200"),
        (1.0, "1.000"),
        (1.2344, "1.234"),
        (-0.0234, "-0.023"),
        (0.0034, "0.0034"),
        (1e-5, "1.0e-05"),
        (0, "0"),
        (None, "–"),
    ],
)
def test_numbers_keep_about_four_digits(figure: float | None, text: str) -> None:
    assert number(figure) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.012, "12ms"),
        (0.12, "0.12s"),
        (9.99, "9.99s"),
        (9.999, "10.0s"),
        (59.96, "1m00s"),
        (125, "2m05s"),
        (11220, "3h07m"),
        (187200, "2d04h"),
    ],
)
def test_durations_change_their_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_shares_are_percents() -> None:
    assert [percent(share) for share in (0, 0.123, 0.9999, 1, None)] == ["0%", "12.3%", "100%", "100%", "–"]


def test_the_mismatch_shows_what_stands_behind_the_one() -> None:
    assert error_factor(1.000213) == "1.00021"


def test_clocks_count_whole_seconds() -> None:
    assert span(59.9) == "59s"
