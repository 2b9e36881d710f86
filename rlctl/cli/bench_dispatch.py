"""`rlctl bench dispatch`: checks what is asked for, measures, shows a table, a plot or JSON."""

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from rlctl.cli.bench_common import Say, check_plot, finish, tell
from rlctl.cli.output import OK, examples
from rlctl.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rich.console import Console

    from rlctl.bench.dispatch import DispatchRow, Spread

_UNITS = {"": 1, "KB": 1 << 10, "MB": 1 << 20}
_LEGEND = (
    "round trip of a call that only takes its payload, median and 99th percentile; submit: the part of it before "
    "the driver waits; bare: both through a graph over bare actors, of bytes that Ray only hands on for submit: the "
    "floor; idle: cores that a worker burns while its graph lives and nobody calls it"
)

EPILOG = examples(
    "rlctl bench dispatch",
    "rlctl bench dispatch --workers 1,8 --payloads 1KB,64MB --json",
    "rlctl bench dispatch --plot dispatch.svg",
)


def dispatch(
    workers: Annotated[str, typer.Option(help="Sizes of the groups.")] = "1,2,4,8",
    payloads: Annotated[str, typer.Option(help="What each worker gets with a call: bytes, KB or MB.")] = "1KB,1MB,8MB",
    calls: Annotated[int, typer.Option(min=20, help="Calls a row; a row of slow ones ends after 10 s.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of the table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG or SVG here; needs matplotlib.")] = None,
) -> None:
    """Time what one call to a group of workers costs the driver: ordinary calls against a Ray Compiled Graph."""
    problems: list[Problem] = []
    check_plot(plot, problems)
    sizes = _numbers("--workers", workers, {"": 1}, problems)
    bytes_ = _numbers("--payloads", payloads, _UNITS, problems)
    if problems:
        raise ConfigError(problems)
    raise typer.Exit(_measure(sizes, bytes_, calls, as_json, plot))


def _numbers(option: str, given: str, units: dict[str, int], problems: list[Problem]) -> tuple[int, ...]:
    found = []
    for part in (part.strip() for part in given.split(",")):
        number = part.rstrip("KMBkmb")
        unit = part[len(number) :].upper()
        if not number.isdecimal() or int(number) < 1 or unit not in units:
            like = "1KB,8MB" if len(units) > 1 else "1,2,4"
            problems.append(Problem(option, "", f"{part!r}: numbers from 1 on with commas, like {like}"))
            return ()
        found.append(int(number) * units[unit])
    return tuple(found)


def _measure(workers: tuple[int, ...], payloads: tuple[int, ...], calls: int, as_json: bool, plot: Path | None) -> int:
    from rlctl.bench.dispatch import DispatchBench, run_dispatch_bench
    from rlctl.bench.plot import write_dispatch_plot
    from rlctl.cluster.local import local_ray

    logs = Path(tempfile.mkdtemp(prefix="rlctl-bench-"))

    def measure(say: Say) -> "list[DispatchRow]":
        with local_ray(logs):
            return run_dispatch_bench(DispatchBench(workers, payloads, calls), str(logs), say)

    def report(rows: "list[DispatchRow]") -> int:
        facts = [row.as_json() for row in rows]
        tell(facts, partial(show, rows), as_json, partial(write_dispatch_plot, rows), plot)
        return OK

    return finish(measure, report, logs)


def show(rows: list["DispatchRow"], out: "Console") -> None:
    """The table, and why there is no graph where there is none."""
    # Ten columns fit into 80 characters with one between them.
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("workers", "payload", "ordinary", "compiled", "p99", "ratio", "bare", "submit", "bare", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.workers),
            _size(row.payload),
            _both(row.ordinary)[0],
            *_both(row.compiled),
            "" if row.ratio is None else f"{row.ratio:.1f}x",
            _both(row.plain)[0],
            _both(row.submit)[0],
            _both(row.plain_submit)[0],
            f"{row.idle:.2f}",
        )
    out.print(table)
    for why in sorted({row.why for row in rows if row.why}):
        out.print(Text(f"no compiled graph: {why}", style="yellow"))
    out.print(Text(_LEGEND, style="dim"))


def _both(spread: "Spread | None") -> tuple[str, str]:
    return ("", "") if spread is None else (_time(spread.median), _time(spread.p99))


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _size(payload: int) -> str:
    name, unit = next((n, u) for n, u in reversed(_UNITS.items()) if payload >= u)
    return f"{payload / unit:g} {name or 'B'}"
