"""Tables of all commands: no lines, columns some blanks apart, and three kinds of column."""

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Column, Table


def make_table(
    *columns: Column, rows: Iterable[Iterable[RenderableType]] = (), titles: str | None = None, gap: int = 2
) -> Table:
    """Return a table without lines. titles: style of the columns' titles; None: none is shown. gap: blanks between."""
    table = Table(*columns, box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=titles is not None)
    table.header_style = titles or ""
    for row in rows:
        table.add_row(*row)
    return table


def names(title: str = "", style: str = "cyan", width: int | None = None) -> Column:
    """Return a column of short words that are never broken."""
    return Column(title, style=style, width=width, no_wrap=True)


def figures(title: str = "") -> Column:
    """Return a column of numbers, to the right."""
    return Column(title, justify="right", no_wrap=True)


def texts(title: str = "", style: str = "") -> Column:
    """Return a column of text, which is broken where it is long."""
    return Column(title, style=style, overflow="fold")
