"""An asynchronous run as it passes: what the trainer did over the last steps, above how busy the generator was."""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from itertools import groupby
from typing import TypeVar

from rlctl.dashboard.balance_hint import hint
from rlctl.dashboard.formats import duration, percent
from rlctl.dashboard.panels.canvas import Part, Row, box, row, spread
from rlctl.dashboard.panels.draw import SPARKS
from rlctl.dashboard.state import RunState
from rlctl.telemetry.jsonl import Record

STEPS = 24
LABEL = 18
# Told apart without colour too. Phases by the order in which a step goes through them; idle times come first.
SIGNS = {
    "idle": ("·", "bright_black"),
    "log_probs": ("▓", "cyan"),
    "train": ("█", "green"),
    "refit": ("▒", "magenta"),
    "other": ("░", "white"),
}
Name = TypeVar("Name", bound=Hashable)


def lanes(state: RunState, width: int, height: int) -> list[Row]:
    """Two lanes over the same seconds; below them the axis and what to change, where there is room."""
    cells = width - 4 - LABEL
    recent = state.steps.recent(STEPS)
    seconds = sum(_seconds(record) for record in recent)
    rows = [
        [*_label(state, "trainer"), *_coloured(_trainer(recent, cells))],
        [*_label(state, "generator"), *row((_generator(recent, cells), "blue"))],
        _axis(seconds, width - 4),
    ]
    if advice := hint(state):
        rows.insert(2, row(("→ ", "bold yellow"), (advice, "yellow")))
    return box("Lanes", rows, width, height, _refit(state))


def _label(state: RunState, side: str) -> Row:
    idle = state.generated(f"idle/{side}") if side == "generator" else state.latest(f"idle/{side}")
    return row((f"{side:<10}", "bright_black"), (f"{percent(None if idle is None else 1 - idle):>6}", "bold"), "  ")


def _refit(state: RunState) -> str:
    parts = [
        f"{label} {duration(value)}"
        for label, name in (("refit", "refit/seconds"), ("stall", "refit/stall"))
        if (value := state.latest(name)) is not None
    ]
    return " · ".join(["busy", *parts])


def _axis(seconds: float, width: int) -> Row:
    signs = [part for name, sign in SIGNS.items() for part in (sign, (f" {name.replace('_', ' ')}  ", "bright_black"))]
    return spread(row(f"{f'-{duration(seconds)}':<{LABEL}}", *signs), row(("now", "bright_black")), width)


def _trainer(records: list[Record], cells: int) -> list[str]:
    """For each cell what took most of its time."""
    spans = [span for record in records for span in _spans(record)]
    return [max(shares, key=lambda name: shares[name]) for shares in _cut(spans, cells)]


def _generator(records: list[Record], cells: int) -> str:
    """For each cell a block as high as the generator was busy: not at all where no engine had anything to say."""
    spans = [(_seconds(record), float(record.get("idle/generator", 1.0))) for record in records]
    shares = (sum(idle * part for idle, part in cell.items()) for cell in _cut(spans, cells))
    return "".join(SPARKS[min(6, max(0, round((1 - idle) * 6)))] for idle in shares)


def _cut(spans: list[tuple[float, Name]], cells: int) -> Iterator[dict[Name, float]]:
    """The spans, laid end to end, cut into equal cells: for each the share of its time that every name has."""
    whole = sum(length for length, _ in spans)
    if whole <= 0 or cells < 1:
        return
    size, index, left = whole / cells, 0, spans[0][0]
    for _ in range(cells):
        shares: defaultdict[Name, float] = defaultdict(float)
        room = size
        while room > 1e-9 * size and index < len(spans):
            part = min(room, left)
            shares[spans[index][1]] += part / size
            room, left = room - part, left - part
            if left <= 1e-12 * whole:
                index += 1
                left = spans[index][0] if index < len(spans) else 0.0
        yield dict(shares) or {spans[-1][1]: 1.0}


def _spans(record: Record) -> list[tuple[float, str]]:
    """(seconds, sign's name) of a step, in order."""
    known: dict[str, float] = dict.fromkeys(SIGNS, 0.0)
    for key, value in record.items():
        if key.startswith("time/") and key != "time/step":
            name = key.removeprefix("time/")
            sign = "idle" if name.startswith("idle_") else name if name in known else "other"
            known[sign] += float(value)
    return [(seconds, name) for name, seconds in known.items() if seconds > 0]


def _seconds(record: Record) -> float:
    return float(record.get("time/step", 0.0))


def _coloured(names: list[str]) -> Row:
    parts: list[Part] = []
    for name, run in groupby(names):
        sign, style = SIGNS[name]
        parts.append((sign * len(list(run)), style))
    return row(*parts)
