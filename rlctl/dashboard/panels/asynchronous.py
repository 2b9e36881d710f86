"""Panels of an asynchronous run: a timeline of both sides over the last steps, and the ages of its groups."""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from itertools import groupby
from typing import TypeVar

from rlctl.dashboard.balance_hint import hint
from rlctl.dashboard.formats import NONE, duration, error_factor, percent
from rlctl.dashboard.panels.canvas import Part, Row, box, row, spread
from rlctl.dashboard.panels.draw import SPARKS, bar
from rlctl.dashboard.state import RunState
from rlctl.grpo.losses.sections import MISMATCH_BY_AGE
from rlctl.grpo.metric_rows import MIXED_VERSIONS
from rlctl.refit.protocol import REFIT_SECONDS, REFIT_STALL
from rlctl.telemetry.clock import STEP_SECONDS
from rlctl.telemetry.jsonl import Record
from rlctl.telemetry.throughput import GENERATOR_IDLE

STEPS = 24
LABEL = 18
# Distinct without colour too. Phases in the order of a step; idle times come first.
SIGNS = {
    "idle": ("·", "bright_black"),
    "log_probs": ("▓", "cyan"),
    "train": ("█", "green"),
    "refit": ("▒", "magenta"),
    "other": ("░", "white"),
}
Name = TypeVar("Name", bound=Hashable)


def timeline(state: RunState, width: int, height: int) -> list[Row]:
    """Draw trainer and generator over the same seconds; below them advice and the axis where there is room."""
    cells = width - 4 - LABEL
    recent = state.steps.recent(STEPS)
    spans = [span for record in recent for span in _spans(record)]
    phases = [max(shares, key=lambda name: shares[name]) for shares in _cut(spans, cells)]
    trainer = [(SIGNS[name][0] * len(list(run)), SIGNS[name][1]) for name, run in groupby(phases)]
    idle = [(_seconds(record), float(record.get(GENERATOR_IDLE.name, 1.0))) for record in recent]
    shares = (sum(part * share for part, share in cell.items()) for cell in _cut(idle, cells))
    generator = "".join(SPARKS[min(6, max(0, round((1 - share) * 6)))] for share in shares)
    signs: list[Part] = []
    for name, sign in SIGNS.items():
        signs += [sign, (f" {name.replace('_', ' ')}  ", "bright_black")]
    seconds = duration(sum(map(_seconds, recent)))
    rows = [
        [*_label(state, "trainer"), *row(*trainer)],
        [*_label(state, "generator"), *row((generator, "blue"))],
        spread(row(f"{f'-{seconds}':<{LABEL}}", *signs), row(("now", "bright_black")), width - 4),
    ]
    if advice := hint(state):
        rows.insert(2, row(("→ ", "bold yellow"), (advice, "yellow")))
    refit = [
        f"{label} {duration(value)}"
        for label, name in (("refit", REFIT_SECONDS.name), ("stall", REFIT_STALL.name))
        if (value := state.latest(name)) is not None
    ]
    return box("Timeline", rows, width, height, " · ".join(["busy", *refit]))


def _label(state: RunState, side: str) -> Row:
    idle = state.generated(f"idle/{side}") if side == "generator" else state.latest(f"idle/{side}")
    return row((f"{side:<10}", "bright_black"), (f"{percent(None if idle is None else 1 - idle):>6}", "bold"), "  ")


def _cut(spans: list[tuple[float, Name]], cells: int) -> Iterator[dict[Name, float]]:
    """Lay spans of (seconds, name) end to end, cut them into equal cells, and yield each cell's share by name."""
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
    """Return (seconds, key of SIGNS) of a step, in order."""
    known: dict[str, float] = dict.fromkeys(SIGNS, 0.0)
    for key, value in record.items():
        if key.startswith("time/") and key != STEP_SECONDS.name:
            name = key.removeprefix("time/")
            sign = "idle" if name.startswith("idle_") else name if name in known else "other"
            known[sign] += float(value)
    return [(seconds, name) for name, seconds in known.items() if seconds > 0]


def _seconds(record: Record) -> float:
    return float(record.get(STEP_SECONDS.name, 0.0))


def age_bound(state: RunState) -> int | None:
    """Return the run's bound on age in steps; None for a synchronous run, and before the first step."""
    ages = 0
    while state.latest(f"buffer/age_{ages}") is not None:
        ages += 1
    return ages - 1 if ages else None


def ages(state: RunState, width: int, height: int) -> list[Row]:
    """Draw a row for each age: groups trained in the last step, groups in flight, mismatch of tokens of that age."""
    oldest, last = age_bound(state) or 0, state.last
    shown: list[tuple[float, float, float | None]] = [
        (last.get(f"age/groups_{age}", 0.0), last.get(f"buffer/age_{age}", 0.0), last.get(MISMATCH_BY_AGE.name_of(age)))
        for age in range(oldest + 1)
    ]
    room = height - 3
    if len(shown) > room >= 1:
        rest = shown[room - 1 :]
        worst = max((one[2] for one in rest if one[2] is not None), default=None)
        shown = [*shown[: room - 1], (sum(one[0] for one in rest), sum(one[1] for one in rest), worst)]
    cells = max(0, (width - 4 - 4 - 2 * 6 - 10) // 2)
    scale = max((value for trained, waiting, _ in shown for value in (trained, waiting)), default=0.0)

    def counted(value: float, style: str) -> tuple[Part, Part]:
        drawn = bar(value / scale, cells) if scale > 0 and value else ""
        return (f"{value:>4.0f} ", "bold"), (f"{drawn:<{cells}} ", style)

    rows = [row((f"{'age':<4}{'trained':<{cells + 6}}{'in flight':<{cells + 6}}{'mismatch':>10}", "bright_black"))]
    for age, (trained, waiting, error) in enumerate(shown):
        more = age == len(shown) - 1 and len(shown) <= oldest
        label = (f"{f'{age}+' if more else age:<4}", "bright_black")
        factor = f"{error_factor(error) if error is not None else NONE:>10}"
        rows.append(row(label, *counted(trained, "green"), *counted(waiting, "blue"), factor))
    aside = f"≤ {oldest} · mixed {percent(state.latest(MIXED_VERSIONS.name))}"
    return box("Age of groups", rows, width, height, aside)
