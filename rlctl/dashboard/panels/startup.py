"""Before the first step: what is starting, since when, and what is done already."""

from rlctl.dashboard.formats import duration, span, ticking
from rlctl.dashboard.panels.canvas import Row, box, row
from rlctl.dashboard.panels.draw import bar
from rlctl.dashboard.state import RunState


def startup(state: RunState, width: int, height: int) -> list[Row]:
    items = [(what, since, seconds) for what, (since, seconds) in state.startup.items()]
    scale = max((seconds or state.now - since for _, since, seconds in items), default=0.0)
    if state.phase is not None and not state.steps:
        name, step, since = state.phase
        items.append((f"{name.replace('_', ' ')} of step {step}", since, None))
    label = max((len(what) for what, _, _ in items), default=0)
    label = min(label, max(10, width // 2))
    rows = [_line(state, what, since, seconds, scale, label, width - 4) for what, since, seconds in items]
    return box("Starting", rows[-(height - 2) :], width, height, f"for {span(state.elapsed)}")


def _line(state: RunState, what: str, since: float, seconds: float | None, scale: float, label: int, width: int) -> Row:
    done = seconds is not None
    took = seconds if seconds is not None else max(0.0, state.now - since)
    sign = ("✔ ", "green") if done else ("● ", "bold yellow")
    room = min(30, max(0, width - label - 14))
    return row(
        sign,
        (f"{what:<{label}.{label}}", "" if done else "bold"),
        f"{duration(took) if done else ticking(took):>9}  ",
        (bar(min(1.0, took / scale) if scale > 0 else 0.0, room), "green" if done else "yellow"),
    )
