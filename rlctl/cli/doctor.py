"""`rlctl doctor`: checks this machine and prints the command that mends each problem."""

import json
from dataclasses import asdict
from pathlib import Path

import typer

from rlctl.cli.arguments import AsJson
from rlctl.cli.output import FAILED, console, examples

EPILOG = examples("rlctl doctor", "rlctl doctor --json")

_SIGNS = {"ok": ("ok", "green"), "warning": ("!", "yellow"), "broken": ("broken", "bold red")}


def doctor(as_json: AsJson = False) -> None:
    """Check this machine, and name the command that mends each problem.

    Exit code 1 if something that a run needs is broken.
    """
    from rich.text import Text

    from rlctl.dashboard.console import make_table, names, texts
    from rlctl.preflight.doctor import examine

    checks = examine(Path.cwd())
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        table = make_table(names(style=""), names(), texts())
        for check in checks:
            sign, style = _SIGNS[check.state]
            finding = Text(check.found)
            if check.fix:
                finding.append(f"\n{check.fix}", style="bold")
            table.add_row(Text(sign, style=style), Text(check.name), finding)
        console().print(table, soft_wrap=False)
    if any(check.state == "broken" for check in checks):
        raise typer.Exit(FAILED)
