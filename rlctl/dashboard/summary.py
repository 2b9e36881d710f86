"""The end of a run: what it reached, what it cost, and the commands to type next."""

import sys
from collections.abc import Iterator
from contextlib import suppress

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rlctl.dashboard.balance_hint import hint
from rlctl.dashboard.event_text import ENDS, one_line
from rlctl.dashboard.formats import duration, error_factor, gib, number, percent, span
from rlctl.dashboard.state import RunState, best_checkpoint
from rlctl.telemetry.throughput import split


def print_summary(state: RunState, console: Console) -> None:
    """The summary table and the Next steps block; commands are printed whole, however long."""
    console.print(summary_table(state))
    print_next_steps(state, console)


def say_goodbye(state: RunState, console: Console, failure: Exception | None = None) -> None:
    """`print_summary` for the end of a view, whose own failure comes first. Never raises: no run fails because
    its last words found no reader."""
    try:
        if failure is not None:
            console.print(Text(f"the view stopped early: {failure!r}", style="yellow"))
        print_summary(state, console)
    except (Exception, SystemExit) as error:  # rich leaves the program at a broken pipe
        with suppress(OSError):
            print(f"the summary could not be printed: {error!r}", file=sys.stderr)


def summary_table(state: RunState) -> Group:
    """How it ended, in a line of its own, then the table."""
    style = ENDS.get(state.status, "bold red" if state.status == "died" else "cyan")
    reason = one_line(state.end.get("reason") or "")
    title = Text.assemble((f"{state.name} ", "bold"), (state.status, style), f": {reason}" if reason else "")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bright_black", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _lines(state):
        table.add_row(label, value)
    return Group(title, table)


def print_next_steps(state: RunState, console: Console) -> None:
    commands = state.end.get("next") or []
    if commands:
        console.print("\n[bold]Next steps[/]")
        for command in commands:
            console.print(Text(f"  {command}"), soft_wrap=True, highlight=False)


def _lines(state: RunState) -> Iterator[tuple[str, str]]:
    yield "steps", f"{state.step} of {state.num_steps or '?'} in {span(state.elapsed)}"
    for line in state.start.get("damaged") or []:
        yield "damaged", f"{one_line(line)}; gone on after step {state.start.get('start_step', 0)} instead"
    for label, name, show in (
        ("held-out accuracy", "validation/accuracy", percent),
        ("held-out pass@k", "validation/pass_at_k", percent),
        ("held-out loss", "validation/loss", number),
        ("train accuracy", "reward/accuracy", percent),
        ("reward", "reward/mean", number),
        ("loss", "loss/nll", number),
    ):
        if series := state.series(name):
            yield label, f"{show(series[0][1])} → {show(series[-1][1])}  (step {series[0][0]} → {series[-1][0]})"
    if failed := _failed_rewards(state):
        yield "failed rewards", failed
    yield from _checkpoints(state)
    yield from _speed(state)
    # Where older weights sample, the largest says how far training came in between, not that anything is wrong.
    if (mismatch := state.values("mismatch/token_mult_prob_error")) and not any(state.values("age/max")):
        yield "mismatch", f"{error_factor(max(mismatch))} at most (1 is exact)"
    if parity := state.values("mismatch/parity"):
        yield "parity", f"{error_factor(max(parity))} at most (1 is exact), under equal weights"
    if state.health:
        yield "warnings", " · ".join(_warned(check, list(said)) for check, said in state.health.items())
    peaks = [
        f"{side} {gib(max(values))}"
        for side in ("trainer", "engine", "driver")
        if (values := state.values(f"memory/{side}_gib"))
    ]
    if peaks:
        yield "peak memory", " · ".join(peaks)


def _failed_rewards(state: RunState) -> str:
    """Rollouts whose rewards failed, in training and held-out; empty where there are none."""
    failed = [count for count in state.values("reward/failed") if count]
    held_out = sum(state.values("validation/failed_rewards"))
    parts = []
    if failed:
        most = max(state.values("reward/failed_share"), default=0.0)
        steps = f"{len(failed)} of {len(state.steps)} steps"
        parts.append(f"{sum(failed):,.0f} rollouts in {steps}, at most {percent(most)} of a step's")
    if held_out:
        parts.append(f"{held_out:,.0f} held-out answers")
    return " · ".join(parts)


def _warned(check: str, steps: list[int]) -> str:
    shown = f"{', '.join(map(str, steps[:3]))}{', ...' if len(steps) > 3 else ''}"
    times = f" {len(steps)} times" if len(steps) > 1 else ""
    return f"{check.replace('_', ' ')}{times} (step {shown})"


def _checkpoints(state: RunState) -> Iterator[tuple[str, str]]:
    best = best_checkpoint(state)
    if best is not None:
        step, value = best
        metric = state.checkpoint_metric.removeprefix("-")
        yield "best checkpoint", f"{state.checkpoints[step].get('path', f'step {step}')}  ({metric} {number(value)})"
    elif state.checkpoints:
        newest = state.checkpoints[max(state.checkpoints)]
        yield "checkpoint", str(newest.get("path", f"step {newest['step']}"))


def _speed(state: RunState) -> Iterator[tuple[str, str]]:
    rates = [
        f"{name} {number(mean)}"
        for name in ("effective", "training", "generation")
        if (mean := state.mean(f"throughput/{name}")) is not None
    ]
    if rates:
        yield "throughput", " · ".join(rates) + " tokens/s/device"
    if (mfu := state.mean("throughput/mfu")) is not None:
        yield "MFU", percent(mfu)
    if (step := state.mean("time/step")) is not None:
        shares = split(state.steps.recent(len(state.steps)))
        top = " · ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in shares[:6] if share >= 0.005)
        yield "step time", f"{duration(step)}: {top}"
    idle = [
        f"{side} {percent(mean)}"
        for side in ("trainer", "generator")
        if (mean := state.mean(f"idle/{side}")) is not None
    ]
    if idle:
        yield "idle", " · ".join(idle)
    if (age := state.mean("age/mean")) is not None:
        oldest, mixed = max(state.values("age/max")), state.mean("age/mixed")
        yield "age of groups", f"mean {number(age)} · at most {oldest:.0f} steps · mixed versions {percent(mixed)}"
    if advice := hint(state):
        yield "advice", advice
