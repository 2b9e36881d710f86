"""The last events, newest below, each whole: on several rows where one is too narrow."""

import textwrap
import time

from rlctl.dashboard.event_text import describe
from rlctl.dashboard.panels.canvas import Row, box, row
from rlctl.dashboard.state import RunState

CLOCK = 10


def log(state: RunState, width: int, height: int, legend: str = "") -> list[Row]:
    """legend: words on the lower edge."""
    room = height - 2
    told = [event for event in state.events if event["kind"] != "validation_started"]
    recent = sorted([*told, *state.validations.recent(height)], key=lambda event: float(event["time"]))[-height:]
    rows: list[Row] = []
    for event in reversed(recent):
        lines = _lines(event, width - 4)
        if rows and len(rows) + len(lines) > room:
            break
        # Of one that is longer than the panel the beginning says most.
        rows = [*lines[:room], *rows]
    return box("Events", rows, width, height, below=legend)


def _lines(event: dict[str, object], width: int) -> list[Row]:
    if event["kind"] == "checkpoint":
        _, folder, step = str(event.get("path", "")).rpartition("checkpoints/")
        event = {**event, "path": folder + step}
    text, style = describe(event)
    clock = time.strftime("%H:%M:%S", time.localtime(float(str(event["time"]))))
    first, *more = textwrap.wrap(text, max(20, width - CLOCK)) or [""]
    return [
        row((f"{clock:<{CLOCK}}", "bright_black"), (first, style)),
        *(row(" " * CLOCK, (line, style)) for line in more),
    ]
