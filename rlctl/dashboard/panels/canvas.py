"""Rows of styled text, and boxes around rows, at exact widths.

Rows are lists of rich Segments. This takes a tenth of the time of rich's Layout and Table, and no row is ever wider
than requested.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

Row = list[Segment]
Part = str | tuple[str, str]

BORDER = Style.parse("bright_black")
PLAIN = Style.null()


def row(*parts: Part) -> Row:
    """Return a row of parts. A part is plain text or (text, style)."""
    segments = []
    for part in parts:
        if isinstance(part, str):
            segments.append(Segment(part, PLAIN))
        else:
            text, style = part
            segments.append(Segment(text, Style.parse(style)))
    return segments


def fit(content: Row, width: int) -> Row:
    """Crop or pad a row to exactly `width` cells."""
    if Segment.get_line_length(content) > width > 1:
        return [*Segment.adjust_line_length(content, width - 1), Segment("…", BORDER)]
    return Segment.adjust_line_length(content, width, style=PLAIN)


def spread(begin: Row, end: Row, width: int) -> Row:
    """Return a row with `begin` at its left end and `end` at its right end; without `end` if both do not fit."""
    room = width - Segment.get_line_length(end)
    if Segment.get_line_length(begin) + 1 > room:
        return fit(begin, width)
    return [*fit(begin, room), *end]


def box(title: str, content: Sequence[Row], width: int, height: int, aside: str = "", below: str = "") -> list[Row]:
    """Return rows with a frame of exactly width x height around `content`.

    aside: text at the right of the upper edge. below: text at the right of the lower edge. A text without room is left
    out.
    """
    inner = width - 4
    content_height = height - 2
    empty_rows: list[Row] = [[]] * (content_height - len(content))
    side = Segment("│", BORDER)
    blank = Segment(" ", PLAIN)
    rows = [_edge(title, aside, width)]
    for line in [*content[:content_height], *empty_rows]:
        rows.append([side, blank, *fit(line, inner), blank, side])
    room = width - cell_len(below) - 5
    if not below or room < 0:
        rows.append(row(("╰" + "─" * (width - 2) + "╯", "bright_black")))
    else:
        rows.append(row((f"╰{'─' * room} {below} ─╯", "bright_black")))
    return rows[:height]


def place_side_by_side(*blocks: Sequence[Row]) -> list[Row]:
    """Return the rows of blocks of equal height, joined from left to right."""
    return [list(chain.from_iterable(rows)) for rows in zip_longest(*blocks, fillvalue=[])]


def _edge(title: str, aside: str, width: int) -> Row:
    """Return the upper edge of a box. `aside` is left out, or the title cut, if there is no room."""
    begin = [Segment("╭─", BORDER), *row((f" {title} ", "bold"))] if title else [Segment("╭─", BORDER)]
    end = [*row((f" {aside} ", "bright_black")), Segment("─╮", BORDER)] if aside else [Segment("─╮", BORDER)]
    room = width - Segment.get_line_length(begin) - Segment.get_line_length(end)
    if room < 0 and aside:
        return _edge(title, "", width)
    if room < 0:
        return [Segment("╭─", BORDER), *fit(row((f" {title}", "bold")), width - 4), Segment("─╮", BORDER)]
    return [*begin, Segment("─" * room, BORDER), *end]


class Frame:
    """Rows as a rich renderable: at most `height` rows of exactly `width` cells, without wrapping."""

    def __init__(self, rows: Iterable[Row], width: int, height: int) -> None:
        self.rows = [fit(line, width) for line in rows][:height]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.rows:
            yield from line
            yield Segment.line()
