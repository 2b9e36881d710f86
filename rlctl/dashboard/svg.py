"""A run as a picture: the dashboard's last screen as a self-contained SVG, for READMEs and reports."""

import io
from pathlib import Path

from rich.terminal_theme import TerminalTheme

from rlctl.dashboard.dashboard import render
from rlctl.dashboard.safe_console import SafeConsole
from rlctl.dashboard.state import RunState

THEME = TerminalTheme(
    (16, 20, 28),
    (205, 211, 222),
    [
        (38, 44, 56),
        (240, 97, 109),
        (126, 211, 133),
        (235, 196, 106),
        (97, 164, 240),
        (204, 140, 240),
        (86, 200, 206),
        (190, 197, 210),
    ],
    [
        (112, 122, 140),
        (255, 130, 140),
        (150, 230, 155),
        (250, 215, 130),
        (130, 185, 250),
        (220, 165, 250),
        (120, 220, 226),
        (240, 244, 250),
    ],
)


def write_svg(state: RunState, path: Path, width: int, height: int) -> None:
    """The dashboard at width x height characters. Uses the reader's monospace fonts, loads nothing."""
    console = SafeConsole(
        record=True, width=width, height=height, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(render(state, width, height))
    path.write_text(console.export_svg(title=f"rlctl train {state.algorithm}", theme=THEME, code_format=_FORMAT))


# rich's own template, with a window drawn plainly and without web fonts.
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
