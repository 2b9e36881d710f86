"""Panels of status: the header, the list of parts that start before the first step, and the last events."""

import textwrap
import time

from rlctl.dashboard.event_text import describe, one_line
from rlctl.dashboard.formats import count, duration, span, ticking
from rlctl.dashboard.panels.canvas import Row, box, row, spread
from rlctl.dashboard.panels.draw import bar
from rlctl.dashboard.state import RunState
from rlctl.run.health import WEIGHT_VERSION
from rlctl.run.run_dir import model_name
from rlctl.telemetry.jsonl import Record

HEIGHT = 4
SIGNS = {
    "new": ("○", "bright_black"),
    "running": ("●", "green"),
    "done": ("✔", "bold green"),
    "failed": ("✘", "bold red"),
    "interrupted": ("■", "bold yellow"),
    "stopped": ("■", "bold yellow"),
    "died": ("✘", "bold red"),
}
# Width in cells of an event's clock time.
CLOCK = 10


def header(state: RunState, width: int) -> list[Row]:
    """Draw the run's name, progress and current phase."""
    attempt = int(state.start.get("attempt", 1))
    parts = (model_name(str(state.start.get("model", ""))), f"attempt {attempt}" if attempt > 1 else "")
    version = state.latest(WEIGHT_VERSION.name)
    weights = "" if version is None else f"weights v{version:.0f}"
    details = " · ".join(part for part in (weights, _processes(state.start)) if part)
    content = [_progress_row(state, width - 4), spread(_activity(state), row((details, "bright_black")), width - 4)]
    return box(f"rlctl {state.algorithm} · {state.name}", content, width, HEIGHT, " · ".join(filter(None, parts)))


def _progress_row(state: RunState, width: int) -> Row:
    """Return the row with the number of steps, a bar, the share, and the elapsed and estimated times."""
    total = state.num_steps
    done = state.step
    share = done / total if total else 0.0
    step_text = f"step {done}/{total or '?'}"
    eta = f"  eta {span(state.eta)}" if state.eta is not None else ""
    time_text = f"{share:4.0%}  {span(state.elapsed_s)}{eta}"
    room = width - len(step_text) - len(time_text) - 4
    # The bar has a character for half a cell.
    halves = round(min(1.0, share) * room * 2)
    filled = "━" * (halves // 2) + "╸" * (halves % 2)
    colour = SIGNS[state.status][1] if state.status != "running" else "cyan"
    rest = "┈" * max(0, room - len(filled))
    return row((step_text, "bold"), "  ", (filled, colour), (rest, "bright_black"), "  ", time_text)


def _activity(state: RunState) -> Row:
    """Return the row on the run's present state: its phase while it runs, else its status and the reason."""
    sign, style = SIGNS[state.status]
    if state.status != "running":
        reason = one_line(state.end.get("reason") or ("its process is gone" if state.status == "died" else ""))
        return row((f"{sign} {state.status}", style), f": {reason}" if reason else "")
    if state.phase is None:
        return row((f"{sign} ", style), "starting")
    name, step, since = state.phase
    position = f" of step {step}" if step else ""
    return row((f"{sign} ", style), (name.replace("_", " "), "bold"), f"{position} {ticking(state.now - since)}")


def _processes(start: Record) -> str:
    """Return a text on the numbers of trainer ranks and engines, and of their GPUs."""
    ranks = int(start.get("ranks", 0))
    engines = int(start.get("engines", 0))
    devices = start.get("devices") or {}
    if not ranks:
        return ""
    trainers = count(ranks, "rank")
    if not engines:
        return trainers
    if start.get("device") == "cuda" and start.get("shared"):
        # Both sides are on the same GPUs, so their numbers are not added.
        gpus = max(int(devices.get(side, 1)) for side in ("trainer", "generator"))
        shared = "the same " if gpus > 1 else ""
        return f"{trainers} and {count(engines, 'engine')} on {shared}{count(gpus, 'GPU')}"
    gpus_an_engine = int(devices.get("generator", 1)) // engines if start.get("device") == "cuda" else 1
    text = f"{trainers} · {count(engines, 'engine')}"
    if gpus_an_engine > 1:
        text += f" x {gpus_an_engine} GPUs"
    return text


def startup(state: RunState, width: int, height: int) -> list[Row]:
    """Draw the parts of the run's start with their seconds: finished parts, and parts that are still starting."""
    # Name of a part -> (begin, seconds or None).
    parts = dict(state.startup)
    # The longest part fills a bar. The phase of the first step, added below, does not change the scale.
    scale = max((seconds or state.now - since for since, seconds in parts.values()), default=0.0)
    if state.phase is not None and not state.steps:
        name, step, since = state.phase
        parts[f"{name.replace('_', ' ')} of step {step}"] = (since, None)
    label_width = min(max(map(len, parts), default=0), max(10, width // 2))
    room = min(30, max(0, width - label_width - 18))
    rows = []
    for part, (since, seconds) in parts.items():
        is_started = seconds is not None
        took = seconds if seconds is not None else max(0.0, state.now - since)
        share = min(1.0, took / scale) if scale > 0 else 0.0
        rows.append(
            row(
                ("✔ ", "green") if is_started else ("● ", "bold yellow"),
                (f"{part:<{label_width}.{label_width}}", "" if is_started else "bold"),
                f"{duration(took) if is_started else ticking(took):>9}  ",
                (bar(share, room), "green" if is_started else "yellow"),
            )
        )
    return box("Starting", rows[-(height - 2) :], width, height, f"for {span(state.elapsed_s)}")


def log(state: RunState, width: int, height: int, legend: str = "") -> list[Row]:
    """Draw the last events, the newest at the bottom, long ones on several rows. legend: text on the lower edge."""
    room = height - 2
    events = [event for event in state.events if event["kind"] != "validation_started"]
    events += state.validations.recent(height)
    events.sort(key=lambda event: float(event["time"]))
    rows: list[Row] = []
    for event in reversed(events[-height:]):
        if event["kind"] == "checkpoint":
            # Show the path from `checkpoints/` on, because the header names the run.
            _, folder, step_folder = str(event.get("path", "")).rpartition("checkpoints/")
            event = {**event, "path": folder + step_folder}
        text, style = describe(event)
        clock = time.strftime("%H:%M:%S", time.localtime(float(event["time"])))
        first_line, *further_lines = textwrap.wrap(text, max(20, width - 4 - CLOCK)) or [""]
        lines = [row((f"{clock:<{CLOCK}}", "bright_black"), (first_line, style))]
        lines += [row(" " * CLOCK, (line, style)) for line in further_lines]
        if rows and len(rows) + len(lines) > room:
            break
        # Show the beginning of an event that is longer than the panel.
        rows = [*lines[:room], *rows]
    return box("Events", rows, width, height, below=legend)
