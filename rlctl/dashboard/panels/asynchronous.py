"""Panels of an asynchronous run: a timeline of both sides over the last steps, and the ages of its groups."""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from rlctl.dashboard.balance_hint import hint
from rlctl.dashboard.formats import duration, error_factor, percent
from rlctl.dashboard.panels.canvas import Part, Row, box, row, spread
from rlctl.dashboard.panels.draw import SPARKS, bar
from rlctl.dashboard.state import RunState
from rlctl.grpo.losses.sections import MISMATCH_BY_AGE
from rlctl.grpo.metric_rows import MIXED_VERSIONS
from rlctl.preflight.declared_columns import COLUMN_PHASES
from rlctl.refit.protocol import REFIT_SECONDS, REFIT_STALL
from rlctl.telemetry.clock import STEP_SECONDS
from rlctl.telemetry.jsonl import Record
from rlctl.telemetry.throughput import GENERATOR_IDLE

# Number of last steps in the timeline.
STEPS = 24
# Width of a label in cells.
LABEL = 18
# (character, style) of each phase, in the order of a step, with idle times first. The characters differ, so that phases
# can be told apart without colours.
SIGNS = {
    "idle": ("·", "bright_black"),
    "log_probs": ("▓", "cyan"),
    "critic": ("▚", "bright_green"),
    "train": ("█", "green"),
    "refit": ("▒", "magenta"),
    "other": ("░", "white"),
}
Name = TypeVar("Name", bound=Hashable)


def timeline(state: RunState, width: int, height: int) -> list[Row]:
    """Draw the phases of the trainer and the load of the generator over the last steps, on one axis of time.

    Advice and the axis stand below if there is room.
    """
    cells = width - 4 - LABEL
    recent = state.steps.recent(STEPS)
    trainer_parts: list[Part] = []
    for name, cells_of_phase in groupby(_longest_phases(recent, cells)):
        sign, style = SIGNS[name]
        trainer_parts.append((sign * len(list(cells_of_phase)), style))
    # A span of the generator's line is a step, and its name is the step's idle share.
    idle_spans = [(_seconds(record), float(record.get(GENERATOR_IDLE.name, 1.0))) for record in recent]
    generator = ""
    highest_block = len(SPARKS) - 1
    for shares in _share_by_cell(idle_spans, cells):
        busy = 1 - sum(share * idle for idle, share in shares.items())
        generator += SPARKS[min(highest_block, max(0, round(busy * highest_block)))]
    signs: list[Part] = []
    for name, sign_and_style in SIGNS.items():
        signs += [sign_and_style, (f" {name.replace('_', ' ')}  ", "bright_black")]
    seconds = duration(sum(map(_seconds, recent)))
    rows = [
        _label(state, "trainer") + row(*trainer_parts),
        _label(state, "generator") + row((generator, "blue")),
        spread(row(f"{f'-{seconds}':<{LABEL}}", *signs), row(("now", "bright_black")), width - 4),
    ]
    if advice := hint(state):
        # Above the axis, which is cut off first if there is no room.
        rows.insert(2, row(("→ ", "bold yellow"), (advice, "yellow")))
    aside = "busy"
    for label, metric in (("refit", REFIT_SECONDS), ("stall", REFIT_STALL)):
        refit_seconds = state.latest(metric.name)
        if refit_seconds is not None:
            aside += f" · {label} {duration(refit_seconds)}"
    return box("Timeline", rows, width, height, aside)


def _label(state: RunState, side: str) -> Row:
    idle = state.latest_of_generator(f"idle/{side}") if side == "generator" else state.latest(f"idle/{side}")
    busy = None if idle is None else 1 - idle
    return row((f"{side:<10}", "bright_black"), (f"{percent(busy):>6}", "bold"), "  ")


def _longest_phases(records: list[Record], cells: int) -> Iterator[str]:
    """Yield for each cell of the trainer's line the phase with the largest share of the cell, a key of SIGNS."""
    spans: list[tuple[float, str]] = []
    for record in records:
        spans += _spans(record)
    for shares in _share_by_cell(spans, cells):
        yield max(shares, key=lambda name: shares[name])


def _share_by_cell(spans: list[tuple[float, Name]], cells: int) -> Iterator[dict[Name, float]]:
    """Join spans (seconds, name) to one line, cut it into equal cells, and yield each cell's shares by name."""
    total = sum(seconds for seconds, _ in spans)
    if total <= 0 or cells < 1:
        return
    cell_seconds = total / cells
    index = 0
    span_rest = spans[0][0]
    for _ in range(cells):
        shares: defaultdict[Name, float] = defaultdict(float)
        cell_rest = cell_seconds
        while cell_rest > 1e-9 * cell_seconds and index < len(spans):
            part = min(cell_rest, span_rest)
            shares[spans[index][1]] += part / cell_seconds
            cell_rest -= part
            span_rest -= part
            if span_rest <= 1e-12 * total:
                index += 1
                span_rest = spans[index][0] if index < len(spans) else 0.0
        # Rounding may leave nothing for the last cell.
        yield dict(shares) or {spans[-1][1]: 1.0}


def _spans(record: Record) -> list[tuple[float, str]]:
    """Return (seconds, key of SIGNS) of each phase of a step, in the order of SIGNS."""
    seconds_of: dict[str, float] = dict.fromkeys(SIGNS, 0.0)
    for key, seconds in record.items():
        if key.startswith("time/") and key != STEP_SECONDS.name:
            name = key.removeprefix("time/")
            if name.startswith("idle_"):
                name = "idle"
            elif name not in SIGNS:
                name = "log_probs" if name in COLUMN_PHASES else "other"
            seconds_of[name] += float(seconds)
    return [(seconds, name) for name, seconds in seconds_of.items() if seconds > 0]


def _seconds(record: Record) -> float:
    return float(record.get(STEP_SECONDS.name, 0.0))


def age_bound(state: RunState) -> int | None:
    """Return the run's bound on the age of groups in steps; None for a synchronous run, and before the first step."""
    ages = 0
    while state.latest(f"buffer/age_{ages}") is not None:
        ages += 1
    return ages - 1 if ages else None


def ages(state: RunState, width: int, height: int) -> list[Row]:
    """Draw a row for each age: groups trained in the last step, groups in flight, and the mismatch of their tokens."""
    oldest = age_bound(state) or 0
    last = state.last
    entries = [
        _AgeEntry(
            label=str(age),
            trained=last.get(f"age/groups_{age}", 0.0),
            in_flight=last.get(f"buffer/age_{age}", 0.0),
            mismatch=last.get(MISMATCH_BY_AGE.name_of(age)),
        )
        for age in range(oldest + 1)
    ]
    room = height - 3
    if len(entries) > room >= 1:
        entries = [*entries[: room - 1], _merge_ages(entries[room - 1 :])]
    # Two bars share the width without the frame (4), the label (4), two numbers (6 each) and the mismatch (10).
    cells = max(0, (width - 4 - 4 - 2 * 6 - 10) // 2)
    scale = max(max(entry.trained, entry.in_flight) for entry in entries)

    def count_parts(num_groups: float, style: str) -> tuple[Part, Part]:
        drawn = bar(num_groups / scale, cells) if scale > 0 and num_groups else ""
        return (f"{num_groups:>4.0f} ", "bold"), (f"{drawn:<{cells}} ", style)

    rows = [row((f"{'age':<4}{'trained':<{cells + 6}}{'in flight':<{cells + 6}}{'mismatch':>10}", "bright_black"))]
    for entry in entries:
        label = (f"{entry.label:<4}", "bright_black")
        trained = count_parts(entry.trained, "green")
        in_flight = count_parts(entry.in_flight, "blue")
        rows.append(row(label, *trained, *in_flight, f"{error_factor(entry.mismatch):>10}"))
    aside = f"≤ {oldest} · mixed {percent(state.latest(MIXED_VERSIONS.name))}"
    return box("Age of groups", rows, width, height, aside)


@dataclass(frozen=True)
class _AgeEntry:
    """Groups of one age, or of one age and all greater ages."""

    label: str
    # Number of groups trained in the last step.
    trained: float
    # Number of groups in flight.
    in_flight: float
    # token_mult_prob_error of the tokens of this age; None without tokens.
    mismatch: float | None


def _merge_ages(entries: list[_AgeEntry]) -> _AgeEntry:
    """Return one entry for the groups of several ages, with their largest mismatch."""
    mismatches = [entry.mismatch for entry in entries if entry.mismatch is not None]
    return _AgeEntry(
        label=f"{entries[0].label}+",
        trained=sum(entry.trained for entry in entries),
        in_flight=sum(entry.in_flight for entry in entries),
        mismatch=max(mismatches, default=None),
    )
