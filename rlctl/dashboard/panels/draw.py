"""Drawings made of characters: sparklines, bars in eighths of a cell, line charts in braille. Pure functions."""

from collections.abc import Sequence
from itertools import chain, pairwise

# Without the full block, so that sparklines in neighbouring rows do not touch.
SPARKS = "▁▂▃▄▅▆▇"
EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
# Bits of a braille cell's dots, by row (top first) and column.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

Points = Sequence[tuple[float, float]]


def spark(values: Sequence[float], width: int) -> str:
    """Return a sparkline of at most `width` blocks, scaled from the lowest to the highest value.

    In a longer series each block is the mean of several values. A constant series is flat at the bottom.
    """
    cells = resample(values, width)
    if not cells:
        return ""
    low = min(cells)
    high = max(cells)
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        return SPARKS[0] * len(cells)
    # The range has a part of equal size for each block. The highest value is at the end of the last part.
    highest_block = len(SPARKS) - 1
    shares = [(value - low) / (high - low) for value in cells]
    return "".join(SPARKS[min(highest_block, int(share * len(SPARKS)))] for share in shares)


def resample(values: Sequence[float], count: int) -> list[float]:
    """Return at most `count` values: means of successive parts of `values` with about equal lengths."""
    if count < 1:
        return []
    if len(values) <= count:
        return list(values)
    edges = [index * len(values) // count for index in range(count + 1)]
    return [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(edges)]


def bar(share: float, width: int) -> str:
    """Return a bar that fills `share` (0 to 1) of `width` cells, to an eighth of a cell. From 0.1% on it is visible."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    if share >= 0.001:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8]


def chart(
    series: Sequence[Points], width: int, height: int, bounds: tuple[float, float]
) -> list[list[tuple[str, int]]]:
    """Return a line chart of several series: `height` rows of `width` cells (character, index of its series or -1).

    bounds: values at the lowest and at the highest dot. The x axis goes from the least to the greatest x of all series.
    If two series meet in a cell, the cell has the index of the later one.
    """
    # Each cell is (bits of its dots, index of the series).
    cells = [[(0, -1) for _ in range(width)] for _ in range(height)]
    xs = [x for x, _ in chain.from_iterable(series)]
    if not xs:
        return [[(" ", -1)] * width for _ in range(height)]
    first = min(xs)
    length = max(max(xs) - min(xs), 1e-9)
    low, high = bounds
    # A cell has 2 dots in a line and 4 in a column.
    for index, points in enumerate(series):
        dots = []
        for x, y in points:
            column = round((x - first) / length * (2 * width - 1))
            line = round((high - min(high, max(low, y))) / (high - low) * (4 * height - 1))
            dots.append((column, line))
        for column, line in _connect_dots(dots):
            if 0 <= column < 2 * width and 0 <= line < 4 * height:
                bits, _ = cells[line // 4][column // 2]
                cells[line // 4][column // 2] = (bits | DOTS[line % 4][column % 2], index)
    return [[(_braille(bits), index) for bits, index in line_of_cells] for line_of_cells in cells]


def _braille(bits: int) -> str:
    """Return the braille character with the dots of `bits`; a blank if there are none."""
    return chr(0x2800 + bits) if bits else " "


def _connect_dots(dots: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the dots, and the dots on straight lines between neighbours."""
    connected = set(dots)
    for (x0, y0), (x1, y1) in pairwise(dots):
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        for index in range(count):
            connected.add((round(x0 + (x1 - x0) * index / count), round(y0 + (y1 - y0) * index / count)))
    return connected
