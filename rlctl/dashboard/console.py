"""Console of all commands, their tables, and the export of a screen as a self-contained SVG.

Tables have no lines; blanks separate the columns. A column has names, figures or texts.
"""

import io
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.terminal_theme import TerminalTheme

from rlctl.utils.safe_text import neutral

# Width in characters of the output to a pipe, which has no width itself.
PIPE_WIDTH = 200


def _colours(hexadecimal: str) -> list[tuple[int, int, int]]:
    colours = [int(word, 16) for word in hexadecimal.split()]
    return [(colour >> 16, colour >> 8 & 255, colour & 255) for colour in colours]


# Terminal colours of an SVG, by the page that it is for. Order: black, red, green, yellow, blue, magenta, cyan, white.
THEMES = {
    "dark": TerminalTheme(
        background=(16, 20, 28),
        foreground=(205, 211, 222),
        normal=_colours("262c38 f0616d 7ed385 ebc46a 61a4f0 cc8cf0 56c8ce bec5d2"),
        bright=_colours("707a8c ff828c 96e69b fad782 82b9fa dca5fa 78dce2 f0f4fa"),
    ),
    "light": TerminalTheme(
        background=(252, 252, 250),
        foreground=(46, 52, 64),
        normal=_colours("d9dde4 c4242f 23803a 96690a 1f62b8 8b3fb5 0d7a82 4a5260"),
        bright=_colours("7a8494 a81b25 1b6a2e 7c5607 174f98 742f9a 09636a 20252e"),
    ),
}


class SafeConsole(Console):
    """A rich console that makes escape sequences in texts harmless. Only rich's own sequences reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(neutral(segment.text), segment.style)


def make_table(
    *columns: Column, rows: Iterable[Iterable[RenderableType]] = (), titles: str | None = None, gap: int = 2
) -> Table:
    """Return a table without lines.

    titles: style of the columns' titles; None shows no titles. gap: number of blanks between two columns.
    """
    table = Table(*columns, box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=titles is not None)
    table.header_style = titles or ""
    for row in rows:
        table.add_row(*row)
    return table


def names(title: str = "", style: str = "cyan", width: int | None = None) -> Column:
    """Return a column of short words that are never wrapped."""
    return Column(title, style=style, width=width, no_wrap=True)


def figures(title: str = "") -> Column:
    """Return a column of numbers, aligned to the right."""
    return Column(title, justify="right", no_wrap=True)


def texts(title: str = "", style: str = "") -> Column:
    """Return a column of text that wraps long lines."""
    return Column(title, style=style, overflow="fold")


def write_svg(screen: RenderableType, title: str, path: Path, width: int, height: int, theme: str) -> None:
    """Write a screen of width x height characters as SVG. It uses the reader's monospace fonts and loads nothing.

    theme: a name of `THEMES`.
    """
    console = SafeConsole(
        record=True, width=width, height=height, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(screen)
    path.write_text(console.export_svg(title=title, theme=THEMES[theme], code_format=_FORMAT))


# rich's template with a plain window and without web fonts.
_FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" class="rich-terminal" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{
  font-family: "Fira Code", "JetBrains Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width;
}}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
