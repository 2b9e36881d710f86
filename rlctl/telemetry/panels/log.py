"""The last events, newest below."""

import time

from rlctl.telemetry.describe import describe
from rlctl.telemetry.panels.canvas import Row, box, row
from rlctl.telemetry.state import RunState


def log(state: RunState, width: int, height: int) -> list[Row]:
    told = [event for event in state.events if event["kind"] != "validation_started"]
    shown = sorted([*told, *state.validations.recent(height)], key=lambda event: float(event["time"]))[2 - height :]
    return box("Events", [_line(event) for event in shown], width, height)


def _line(event: dict[str, object]) -> Row:
    text, style = describe(event)
    clock = time.strftime("%H:%M:%S", time.localtime(float(str(event["time"]))))
    return row((f"{clock}  ", "bright_black"), (text, style))
