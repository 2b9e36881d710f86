"""`rlctl doctor`: checks this machine and prints a command for each problem, or installs missing packages."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.arguments import AsJson
from rlctl.cli.output import FAILED, console, examples, note, say

if TYPE_CHECKING:
    from rlctl.preflight.installation import InstallPlan

EPILOG = examples("rlctl doctor", "rlctl doctor --fix", "rlctl doctor --json")
_FIX_HELP = "Install missing packages into this virtual environment. Other commands are printed, for you to type."

_SIGNS = {"ok": ("ok", "green"), "warning": ("!", "yellow"), "broken": ("broken", "bold red")}


def doctor(
    fix: Annotated[bool, typer.Option("--fix", help=_FIX_HELP)] = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine, and name the command that mends each problem.

    Exit code 1 if something that a run needs is broken.
    """
    from rich.text import Text

    from rlctl.dashboard.console import make_table, names, texts
    from rlctl.preflight.doctor import examine, plan_fix

    checks = examine(Path.cwd())
    if fix:
        plan = plan_fix(checks)
        if plan is None:
            note(["no package is missing"])
        else:
            _install(plan)
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


def _install(plan: "InstallPlan") -> None:
    """Print the commands of a plan, and run each unless the plan has an obstacle. Stop after the first that fails."""
    from rlctl.preflight.installation import run_command

    note(plan.notes)
    if plan.obstacle:
        note([f"nothing is installed here unasked: {plan.obstacle}; the commands are"])
    for command in plan.commands:
        say(shlex.join(command), err=True)
        if plan.obstacle is None and run_command(command) != 0:
            say("error: this command failed", err=True)
            return
