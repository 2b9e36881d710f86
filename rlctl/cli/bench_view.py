"""The table of `rlctl bench refit`: all columns where there is room for them, the ones that decide elsewhere."""

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from rlctl.bench.results import PHASES, Results, Row

if TYPE_CHECKING:
    from rich.console import Console

_WIDE, _PIPE = 120, 200


def print_results(results: Results, console: "Console") -> None:
    """A headline, the table, and what its columns mean."""
    if not console.is_terminal:
        console.width = _PIPE
    wide = console.width >= _WIDE
    size = results.payload / 1e9
    shape = f"{results.trainers} trainer rank{'s' * (results.trainers > 1)} to {results.engines} engine"
    shape += "s" * (results.engines > 1)
    shape += f" x {results.tensor_parallel} devices" if results.tensor_parallel > 1 else ""
    bound = f"{size:.2f} GB need {results.bound * 1e3:.1f} ms at the link's {size / results.bound:.1f} GB/s"
    console.print(Text(f"{results.model}, {shape}: {bound}"))
    console.print(_table(results, wide))
    console.print(Text(_LEGEND, style="dim"))


_LEGEND = (
    "ms: median until every engine holds every tensor; share: of the plain link's rate; pause: no sampling; "
    "stall: longest gap between two tokens of running requests beyond their usual one, and ms of such a refit as "
    "the driver sees it; memory: peak on the device beside the weights, trainer and engine; bits: compared with "
    "what was sent"
)


def _table(results: Results, wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("scheme", overflow="fold")
    names = ["ms", "GB/s", "share", *(PHASES if wide else ()), "pause", "stall"]
    names += [*(("driver", "overlap") if wide else ()), "memory", "bits"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in results.rows:
        table.add_row(*_cells(results, row, wide), style="bold" if row.mode else "")
    return table


def _cells(results: Results, row: Row, wide: bool) -> list[str]:
    phases = [_ms(row.phases.get(name)) for name in PHASES] if wide else []
    more = [_ms(row.driver), "" if row.overlap is None else f"{row.overlap:.0%}"] if wide else []
    return [
        row.label,
        _ms(row.seconds),
        f"{results.rate(row):.1f}",
        f"{results.share(row):.0%}",
        *phases,
        _ms(row.pause) if row.checked else "",
        _ms(row.stall),
        *more,
        _memory(row),
        ("differ" if row.wrong else "equal") if row.checked else "",
    ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _memory(row: Row) -> str:
    if not row.trainer_extra and not row.engine_extra:
        return ""
    return f"{row.trainer_extra / 2**30:.1f}+{row.engine_extra / 2**30:.1f} GiB"
