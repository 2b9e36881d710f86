"""Charts that are drawn with characters."""

import pytest

from rlctl.dashboard.panels.draw import bar, chart, resample, spark


def test_a_sparkline_goes_from_the_lowest_block_to_the_highest() -> None:
    assert spark([0, 1, 2, 3, 4, 5, 6], 20) == "▁▂▃▄▅▆▇"


def test_a_constant_sparkline_is_flat_at_the_bottom() -> None:
    assert spark([5.0] * 4, 10) == "▁▁▁▁"


def test_a_sparkline_is_never_wider_than_asked() -> None:
    assert len(spark(list(range(1000)), 17)) == 17
    assert spark([1.0], 0) == ""
    assert spark([], 5) == ""


def test_more_values_than_cells_are_averaged() -> None:
    assert resample([1, 3, 5, 7], 2) == [2, 6]
    assert resample([1, 2], 5) == [1, 2]


@pytest.mark.parametrize(
    ("share", "picture"), [(0, ""), (1, "████"), (0.5, "██"), (0.28125, "█▏"), (0.002, "▏"), (7, "████"), (-1, "")]
)
def test_a_bar_shows_eighths_of_a_cell(share: float, picture: str) -> None:
    assert bar(share, 4) == picture


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    rows = chart([[(0, 0.0), (10, 1.0)]], width=2, height=1, bounds=(0.0, 1.0))
    assert "".join(character for character, _ in rows[0]) == "⡠⠊"


def test_a_later_series_colours_the_cells_it_shares() -> None:
    rows = chart([[(0, 0.0), (1, 0.0)], [(1, 0.0)]], width=3, height=1, bounds=(0.0, 1.0))
    assert [series for _, series in rows[0]] == [0, 0, 1]


def test_values_out_of_bounds_stay_on_the_edge() -> None:
    rows = chart([[(0, -1e9), (1, 1e9)]], width=4, height=2, bounds=(0.0, 1.0))
    assert [len(line) for line in rows] == [4, 4]


def test_an_empty_chart_is_blank() -> None:
    assert chart([[], []], width=2, height=1, bounds=(0.0, 1.0)) == [[(" ", -1), (" ", -1)]]
