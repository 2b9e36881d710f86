"""`rlctl runs`: shows past and running runs from the files in their directories.

If a cluster drives a run, its new records are fetched first.
"""

import json
import os
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer

from rlctl.cli.arguments import AsJson, Follow, Lines
from rlctl.cli.completion import complete_run
from rlctl.cli.output import BAD_INPUT, FAILED, INTERRUPTED, examples, explain_errors, note, say
from rlctl.config.builtin import runs_folder

app = typer.Typer(help="List, show, watch and stop runs.", no_args_is_help=True)

# Eager, so that Typer has read this option when it completes the name of a run (`complete_run`).
Root = Annotated[
    Path | None,
    typer.Option("--dir", help="The folder of the runs; if left out, the default run.dir.", is_eager=True),
]
Run = Annotated[
    str,
    typer.Argument(help="The name or directory of a run; if left out, the newest.", autocompletion=complete_run),
]


@app.command("list", epilog=examples("rlctl runs list", "rlctl runs list --dir experiments --json"))
def list_(root: Root = None, as_json: AsJson = False) -> None:
    """List all runs, newest first."""
    from rlctl.dashboard.console import PIPE_WIDTH, SafeConsole
    from rlctl.dashboard.run_list import catalogue, table

    root = root or runs_folder()
    for folder in root.glob("*/job.json"):
        _bring_up_to_date(folder.parent)
    runs = catalogue(root)
    note(f"{run.name}: {run.note}" for run in runs if run.note)
    if as_json:
        typer.echo(json.dumps([vars(run) for run in runs]))
    elif not runs:
        say(f"no runs in {root}; start one with: rlctl train grpo")
    else:
        # In a pipe, show all columns, for grep and awk.
        has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
        console = SafeConsole(width=None if has_width else PIPE_WIDTH)
        console.print(table(runs, console.width))


@app.command(epilog=examples("rlctl runs show", "rlctl runs show grpo--qwen3-tiny--1 --json"))
def show(run: Run = "", root: Root = None, as_json: AsJson = False) -> None:
    """Show the summary of a run and every metric of its last step."""
    from rlctl.dashboard.console import SafeConsole
    from rlctl.dashboard.run_list import as_dict, metrics_table
    from rlctl.dashboard.state import read_state
    from rlctl.dashboard.summary import print_next_steps, summary_table

    folder = _find_fresh(run, root)
    state = read_state(folder)
    if as_json:
        typer.echo(json.dumps(as_dict(state)))
        return
    console = SafeConsole()
    console.print(summary_table(state))
    if state.steps:
        console.print()
        console.print(metrics_table(state))
    print_next_steps(state, console)


@app.command(epilog=examples("rlctl runs dash", "rlctl runs dash grpo--qwen3-tiny--1 --svg run.svg --theme light"))
def dash(
    run: Run = "",
    root: Root = None,
    svg: Annotated[Path | None, typer.Option(help="Write the screen to this SVG file instead.")] = None,
    width: Annotated[int | None, typer.Option(help="Columns; if left out, the terminal's.", min=20)] = None,
    height: Annotated[int | None, typer.Option(help="Rows; if left out, the terminal's.", min=4)] = None,
    theme: Annotated[Literal["dark", "light"], typer.Option(help="Colours of the SVG.")] = "dark",
) -> None:
    """Watch a run until it ends or Ctrl-C, which leaves it running. A finished run is shown once."""
    from rlctl.dashboard.console import SafeConsole, write_svg
    from rlctl.dashboard.dashboard import render
    from rlctl.dashboard.state import read_state
    from rlctl.dashboard.view import LiveDashboard
    from rlctl.run.run_dir import RunDir

    folder = _find_fresh(run, root)
    state = read_state(folder, samples=True)
    console = SafeConsole(width=width, height=height)
    if svg is not None:
        write_svg(render(state, *console.size), f"rlctl train {state.algorithm}", svg, *console.size, theme)
    elif state.status in ("new", "running") and console.is_terminal:
        from rlctl.cluster.jobs.watch import follow_run

        try:
            with follow_run(folder) as following, LiveDashboard(RunDir(folder), console) as live:
                live.wait(following.is_lost)
            if following.lost:
                say(f"error: {following.lost}", err=True)
                raise typer.Exit(FAILED)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    else:
        rows = console.height
        if height is None and console.is_terminal:
            # One line less: the shell's prompt below must not scroll the first line off the screen.
            rows -= 1
        console.print(render(state, console.width, rows))


@app.command(epilog=examples("rlctl runs stop", "rlctl runs stop grpo--qwen3-tiny--1"))
def stop(run: Run = "", root: Root = None) -> None:
    """Stop a run after its step, with a checkpoint. A second time stops it at once."""
    from rlctl.cluster.jobs.watch import stop_run
    from rlctl.dashboard.state import read_state
    from rlctl.run.run_dir import JobRecord

    folder = _find_run(run, root)
    with explain_errors():
        # Here a damaged job.json is an error. For the other commands it is a note.
        JobRecord.read(folder)
    _bring_up_to_date(folder)
    state = read_state(folder)
    if state.status not in ("new", "running"):
        say(f"{folder.name} does not run: {state.status}")
        return
    with explain_errors():
        at_once = stop_run(folder, state)
    outcome = "ends now"
    if not at_once:
        end = "ends after its step, and is saved" if state.phase else "ends before its next step"
        outcome = f"{end}; watch: rlctl runs dash {quote(str(folder))}"
    say(f"{folder.name} {outcome}")


@app.command(
    epilog=examples(
        "rlctl runs logs --follow",
        "rlctl runs logs grpo--qwen3-tiny--1 --process trainer-0",
        "rlctl runs logs grpo--qwen3-tiny--1 --node gpu2",
    )
)
def logs(
    run: Run = "",
    root: Root = None,
    process: Annotated[
        str | None, typer.Option("--process", help="Only the log of this process, such as trainer-0.")
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", help="Only the logs of the processes on this node of a cluster.")
    ] = None,
    follow: Follow = False,
    lines: Lines = 10,
) -> None:
    """Print the logs of a run's processes, of its newest attempt; of a run over several nodes after the node's name."""
    from rlctl.cluster.jobs.watch import show_run_logs

    with explain_errors():
        raise typer.Exit(show_run_logs(_find_run(run, root), process, node, follow, lines))


@app.command(
    epilog=examples(
        "rlctl runs rollouts                              the newest step's groups",
        "rlctl runs rollouts sums --step 40-60 --worst    where it fails",
        "rlctl runs rollouts sums --validation --group r3 one prompt over the run",
        "rlctl runs rollouts sums --grep 'I cannot' --json",
    )
)
def rollouts(
    run: Run = "",
    root: Root = None,
    step: Annotated[str | None, typer.Option(metavar="N | N-M", help="Only this step, or these steps.")] = None,
    validation: Annotated[bool, typer.Option("--validation", help="Show held-out answers.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Order by mean reward, the lowest first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Order by mean reward, the highest first.")] = False,
    group: Annotated[
        str | None, typer.Option(metavar="ID", help="Only this task: e0-r17, or r17 of all epochs.")
    ] = None,
    grep: Annotated[str | None, typer.Option(metavar="REGEX", help="Only groups with this text.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="The most groups that are shown.", min=1)] = 10,
    follow: Follow = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Token ids too, each sampled one with its log-prob; with --json as lists.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a group a line, as JSON.")] = False,
) -> None:
    """Read the sampled conversations with their rewards and advantages, a group's rollouts side by side."""
    from rlctl.cli.rollouts import Printer, make_query

    query = make_query(step, validation, worst, best, group, grep)
    folder = _find_fresh(run, root)
    printer = Printer(folder, query, as_json, tokens)
    if follow:
        printer.follow()
    else:
        printer.show(limit)


@app.command(
    epilog=examples(
        "rlctl runs report                             of the newest run, beside its files",
        "rlctl runs report sums --open",
        "rlctl runs report sums sums-async -o both.html --png pictures",
    )
)
def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Names or directories of runs, drawn together; if left out, the newest.",
            autocompletion=complete_run,
            show_default=False,
        ),
    ] = None,
    root: Root = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the page to this file; if left out, to the first run's directory."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FOLDER", help="Write the charts to this folder too, as pictures.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one HTML page that loads nothing: curves, step time, events, samples and config of one or more runs."""
    from rlctl.cli.report import write_report

    write_report([_find_fresh(run, root) for run in runs or [""]], output, png, open_it)


def _bring_up_to_date(folder: Path) -> None:
    """Copy the newest records of a run, if a cluster drives it."""
    if not (folder / "job.json").is_file():
        return
    from rlctl.cluster.jobs.watch import refresh_open_run

    if remark := refresh_open_run(folder):
        note([remark])


def _find_fresh(run: str, root: Path | None) -> Path:
    folder = _find_run(run, root)
    _bring_up_to_date(folder)
    return folder


def _find_run(run: str, root: Path | None) -> Path:
    """Return the directory of a run. run: its name or path; empty: the newest run. End the command if there is none."""
    from rlctl.dashboard.run_list import newest
    from rlctl.run.run_dir import find_run

    folder = root or runs_folder()
    if not run:
        latest = newest(folder)
        if latest is None:
            say(f"no runs in {folder}; start one with: rlctl train grpo", err=True)
            raise typer.Exit(BAD_INPUT)
        return latest
    with explain_errors():
        return find_run(run, folder)
