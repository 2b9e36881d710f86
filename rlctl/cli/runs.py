"""`rlctl runs`: what was run and what runs now, from the run directories; those of clusters are asked for first."""

import json
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.arguments import runs_folder
from rlctl.cli.output import explained, say

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

app = typer.Typer(help="Past and running runs: list, show, live view, logs, stop.", no_args_is_help=True)

Run = Annotated[str, typer.Argument(help="Name of a run or its directory; the newest if left out.")]
Root = Annotated[
    Path | None, typer.Option("--dir", help="Folder of the runs; the default is configs/base.yaml's run.dir.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable, on one line.")]


@app.command("list", epilog="Example: rlctl runs list")
def list_(root: Root = None, as_json: AsJson = False) -> None:
    """A table of all runs, newest first."""
    from rlctl.dashboard.run_list import catalogue, table

    for folder in _root(root).glob("*/job.json"):
        _bring_up_to_date(folder.parent)
    entries = catalogue(_root(root))
    if as_json:
        typer.echo(json.dumps([vars(entry) for entry in entries]))
    elif not entries:
        say(f"no runs in {_root(root)}; start one with: rlctl train grpo")
    else:
        _print(table(entries))


@app.command(epilog="Example: rlctl runs show grpo--tiny--1")
def show(run: Run = "", root: Root = None, as_json: AsJson = False) -> None:
    """Summary of a run and every metric of its last step."""
    from rlctl.dashboard.run_list import as_dict, metrics_table
    from rlctl.dashboard.state import read_state
    from rlctl.dashboard.summary import print_next_steps, summary_table

    folder = _find(run, root)
    _bring_up_to_date(folder)
    state = read_state(folder)
    if as_json:
        typer.echo(json.dumps(as_dict(state)))
        return
    console = _print(summary_table(state))
    if state.steps:
        console.print()
        console.print(metrics_table(state))
    print_next_steps(state, console)


@app.command(epilog="Example: rlctl runs dash grpo--tiny--1 --svg dashboard.svg --width 140 --height 40")
def dash(
    run: Run = "",
    root: Root = None,
    svg: Annotated[Path | None, typer.Option(help="Write the screen to this SVG file instead.")] = None,
    width: Annotated[int | None, typer.Option(help="Columns; the terminal's if left out.", min=20)] = None,
    height: Annotated[int | None, typer.Option(help="Rows; the terminal's if left out.", min=4)] = None,
) -> None:
    """Live view of a running run until it ends or Ctrl-C (the run goes on); one screen of a finished one."""
    from rlctl.dashboard.console import SafeConsole, write_svg
    from rlctl.dashboard.dashboard import render
    from rlctl.dashboard.state import read_state
    from rlctl.dashboard.view import LiveDashboard
    from rlctl.run.run_dir import RunDir

    folder = _find(run, root)
    _bring_up_to_date(folder)
    state = read_state(folder)
    console = SafeConsole(width=width, height=height)
    if svg is not None:
        write_svg(render(state, *console.size), f"rlctl train {state.algorithm}", svg, *console.size)
    elif state.status in ("new", "running") and console.is_terminal:
        from rlctl.cluster.jobs.watch import follow_run

        try:
            with follow_run(folder) as following, LiveDashboard(RunDir(folder), console) as live:
                live.wait(following.is_lost)
            if following.lost:
                say(f"error: {following.lost}", err=True)
                raise typer.Exit(1)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    else:
        # The prompt that comes after it must not push the first line out.
        rows = console.height - (height is None and console.is_terminal)
        console.print(render(state, console.width, rows))


@app.command(epilog="Example: rlctl runs stop grpo--tiny--1")
def stop(run: Run = "", root: Root = None) -> None:
    """End a running run after its step, with a checkpoint; a second time, at once."""
    from rlctl.cluster.jobs.watch import stop_job
    from rlctl.dashboard.state import read_state
    from rlctl.run.run_dir import JobRecord

    folder = _find(run, root)
    _bring_up_to_date(folder)
    state, record = read_state(folder), JobRecord.read(folder)
    if state.status not in ("new", "running"):
        say(f"{folder.name} does not run: {state.status}")
        return
    again = any(event.get("asked_to_stop") is True for event in state.of_this_attempt())
    with explained():
        if record is not None:
            stop_job(folder, record, now=again)
        else:
            _stop(folder, state.start)
    what = "ends now" if again else f"ends after its step, and is saved; watch: rlctl runs dash {quote(str(folder))}"
    say(f"{folder.name} {what}")


@app.command(epilog="Example: rlctl runs logs grpo--tiny--1 --follow")
def logs(
    run: Run = "",
    root: Root = None,
    process: Annotated[str | None, typer.Option("--process", help="Of this one alone, such as trainer-0.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Last lines of each file.", min=0)] = 10,
) -> None:
    """What the run's processes wrote in its newest attempt."""
    from rlctl.cluster.jobs.watch import show_run_logs

    with explained():
        raise typer.Exit(show_run_logs(_find(run, root), process, follow, lines))


def _stop(folder: Path, start: "dict[str, Any]") -> None:
    """Ask a driver of this machine to stop."""
    import os
    import signal
    import socket

    if start.get("host") != socket.gethostname():
        where = start.get("host") or "no machine that is known"
        say(f"error: {folder.name} is driven on {where}: stop it there, or press Ctrl-C", err=True)
        raise typer.Exit(2)
    os.kill(int(start["pid"]), signal.SIGTERM)


def _bring_up_to_date(folder: Path) -> None:
    """Of a run that a cluster drives, what has happened since."""
    if not (folder / "job.json").is_file():
        return
    from rlctl.cluster.jobs.watch import refresh_run
    from rlctl.dashboard.state import read_state

    if read_state(folder).status in ("new", "running", "died"):
        refresh_run(folder)


def _print(table: "RenderableType") -> "Console":
    from rlctl.dashboard.console import SafeConsole

    console = SafeConsole()
    console.print(table)
    return console


def _root(root: Path | None) -> Path:
    return root or runs_folder()


def _find(run: str, root: Path | None) -> Path:
    """The directory of a run by name, by path, or the newest; exit code 2 and one line if there is none."""
    from rlctl.dashboard.run_list import newest
    from rlctl.run.run_dir import RunDirError, find_run

    folder = _root(root)
    if not run:
        latest = newest(folder)
        if latest is None:
            say(f"no runs in {folder}; start one with: rlctl train grpo", err=True)
            raise typer.Exit(2)
        return latest
    try:
        return find_run(run, folder)
    except RunDirError as error:
        say(f"error: {error}", err=True)
        raise typer.Exit(2) from None
