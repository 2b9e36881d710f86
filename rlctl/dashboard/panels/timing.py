"""Where a step's time goes: a bar a phase, the last step in full and the mean of recent steps behind it."""

from rlctl.dashboard.formats import NONE, duration
from rlctl.dashboard.panels.canvas import Row, box, row
from rlctl.dashboard.panels.draw import bar
from rlctl.dashboard.state import RunState

RECENT = 20
ORDER = ("data", "generation", "reward", "refit", "log_probs", "advantage", "train", "validation", "checkpoint")
STYLE = {
    "generation": "blue",
    "train": "green",
    "refit": "magenta",
    "log_probs": "cyan",
    "reward": "yellow",
    "validation": "bright_blue",
    "checkpoint": "bright_cyan",
}
Times = dict[str, tuple[float, float]]


def timing(state: RunState, width: int, height: int) -> list[Row]:
    times = phase_times(state)
    last, mean = state.latest("time/step"), state.mean("time/step", RECENT)
    aside = f"last {duration(last)} · mean {duration(mean)}" if last is not None else ""
    rows = _rows(times, height - 2)
    scale = max((seconds for pair in rows.values() for seconds in pair), default=0.0)
    label = max([11, *(len(name) for name in rows)])
    lines = [_line(name, label, *pair, scale, width - 4) for name, pair in rows.items()]
    return box("Step time", lines, width, height, aside)


def phase_times(state: RunState) -> Times:
    """Phase -> (seconds in the last step, mean seconds of the last steps), in the order of a step."""
    recent = state.steps.recent(RECENT)
    names = {key for record in recent for key in record if key.startswith("time/")} - {"time/step"}
    order = sorted((name.removeprefix("time/") for name in names), key=_place)
    return {
        name: (
            float(recent[-1].get(f"time/{name}", 0.0)),
            sum(float(record.get(f"time/{name}", 0.0)) for record in recent) / len(recent),
        )
        for name in order
    }


def _place(name: str) -> tuple[int, str]:
    known = ORDER.index(name) if name in ORDER else len(ORDER)
    return (len(ORDER) + 1 if name == "other" else known, name)


def _rows(times: Times, count: int) -> Times:
    """At most `count` rows: the smallest phases share one row called rest."""
    if len(times) <= count:
        return times
    kept = set(sorted(times, key=lambda name: -max(times[name]))[: max(0, count - 1)])
    small = [pair for name, pair in times.items() if name not in kept]
    rest = (sum(last for last, _ in small), sum(mean for _, mean in small))
    return {**{name: pair for name, pair in times.items() if name in kept}, "rest": rest}


def _line(name: str, label: int, last: float, mean: float, scale: float, width: int) -> Row:
    room = width - 16 - label
    solid = bar(last / scale, room) if scale > 0 else ""
    behind = round(mean / scale * room) if scale > 0 else 0
    colour = STYLE.get(name, "white")
    return row(
        (f"{name.replace('_', ' '):<{label}}", "bright_black"),
        (f"{duration(last) if last else NONE:>7}", "bold"),
        f"{duration(mean):>7}  ",
        (solid, colour),
        ("░" * (behind - len(solid)), colour),
    )
