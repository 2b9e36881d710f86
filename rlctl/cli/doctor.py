"""`rlctl doctor`: shows what this machine has and lacks, and the command that mends it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.output import FAILED, console, examples

if TYPE_CHECKING:
    from rich.table import Table

    from rlctl.preflight.doctor import Check

EPILOG = examples("rlctl doctor", "rlctl doctor --json")

_SIGNS = {"ok": ("ok", "green"), "warning": ("!", "yellow"), "broken": ("broken", "bold red")}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """What this machine has and lacks, and what mends it.

    Exit code 1 if something that a run needs is broken.
    """
    from rlctl.preflight.doctor import examine

    checks = examine(Path.cwd())
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        console().print(format_checks(checks), soft_wrap=False)
    if any(check.state == "broken" for check in checks):
        raise typer.Exit(FAILED)


def format_checks(checks: "list[Check]") -> "Table":
    """A row a check; what mends it stands below what was found."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        sign, style = _SIGNS[check.state]
        found = Text(check.found)
        if check.fix:
            found.append(f"\n{check.fix}", style="bold")
        table.add_row(Text(sign, style=style), Text(check.name, style="cyan"), found)
    return table
