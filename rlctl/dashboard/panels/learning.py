"""Panels of learning: a row for each metric, most important first, and the curve of accuracy (grpo) or loss (sft)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from rlctl.dashboard.formats import error_factor, number, percent
from rlctl.dashboard.panels.canvas import Part, Row, box, row
from rlctl.dashboard.panels.draw import Points, chart, resample, spark
from rlctl.dashboard.state import RunState
from rlctl.grpo.metric_rows import ACCURACY, GREATEST_AGE, HELD_OUT_ACCURACY
from rlctl.sft.metric_rows import HELD_OUT_LOSS, NLL
from rlctl.telemetry.metrics import Metric, PanelRow, Unit


@dataclass(frozen=True)
class ShownMetric:
    """A metric in the panel."""

    name: str
    label: str
    # Formats a value.
    show: Callable[[float | None], str]
    # Declared place and style in the panel.
    place: PanelRow


_SHOW: dict[Unit, Callable[[float | None], str]] = {"share": percent, "factor": error_factor}
# Explanations of metrics in one line. The first one that fits is shown.
LEGENDS = {
    "grpo": (
        "mismatch: token probability, engine to trainer, 1 is exact · uniform: groups of equal rewards, nothing to "
        "learn · effective: end to end",
        "mismatch 1: exact · uniform: rewards all equal · effective: end to end",
    ),
    "async": (
        "mismatch: token probability, engine to trainer, grows with age · parity: under equal weights, 1 is exact · "
        "effective: end to end",
        "mismatch: grows with age · parity: under equal weights, 1 is exact",
    ),
}
CURVES = {
    "grpo": ("Accuracy", ACCURACY.name, HELD_OUT_ACCURACY.name),
    "sft": ("Loss", NLL.name, HELD_OUT_LOSS.name),
}
STYLES = ("green", "bold magenta")
# Width in cells of the labels at the curve's axis.
AXIS = 7


def metrics_of(state: RunState) -> list[ShownMetric]:
    """Return the metrics to show: first the metrics of failures that are above 0, then those that have a value."""
    listed = list[ShownMetric]()
    for metric in state.declared.rows:
        for place in metric.panel:
            if place.algorithm in (None, _algorithm(state)):
                listed += _rows_of(state, metric, place)
    listed.sort(key=lambda metric: metric.place.place)
    failures = []
    ordinary = []
    for shown_metric in listed:
        latest = state.latest(shown_metric.name)
        if shown_metric.place.failure:
            if latest is not None and latest > 0:
                failures.append(shown_metric)
            continue
        # `used`: the metric is shown only if it was above 0 at some step.
        is_used = not shown_metric.place.used or any(state.values(shown_metric.name))
        if latest is not None and is_used:
            ordinary.append(shown_metric)
    return failures + ordinary


def _rows_of(state: RunState, metric: Metric, place: PanelRow) -> Iterator[ShownMetric]:
    """Yield a row for a metric, or for each metric of a family that the newest step recorded."""
    names = [metric.name]
    if metric.is_family:
        names = [name for name in state.last if metric.pattern.fullmatch(name)]
    for name in names:
        label = place.label or name.rpartition("/")[2]
        yield ShownMetric(name, label, _SHOW.get(metric.unit, number), place)


def _algorithm(state: RunState) -> str:
    return state.algorithm if state.algorithm in CURVES else "grpo"


def legend(state: RunState, width: int) -> str:
    """Return an explanation of the metrics of at most `width` cells; empty if none fits or none is needed."""
    kind = "async" if GREATEST_AGE.name in state.last else state.algorithm
    return next((text for text in LEGENDS.get(kind, ()) if len(text) <= width), "")


def learning(state: RunState, width: int, height: int) -> list[Row]:
    """Draw a row for each metric: label, newest value, alarm sign, sparkline."""
    # If older weights or top_p and top_k sample, the step's mismatch is large without an error. The bound is then on
    # the parity metric (`judged_mismatch`), and the panel of ages shows the mismatch by age.
    rows = []
    for metric in metrics_of(state)[: height - 2]:
        latest = state.latest(metric.name)
        values = state.values(metric.name)
        is_alarming = metric.place.failure
        if metric.name == state.judged_mismatch and latest is not None and latest > state.mismatch_bound:
            is_alarming = True
        colour = "bold red" if is_alarming else metric.place.style
        # A series that changes by less than the shown digits is drawn as constant.
        is_constant = bool(values) and metric.show(min(values)) == metric.show(max(values))
        course = [0.0] * len(values) if is_constant else values
        rows.append(
            row(
                (f"{metric.label:<10.10}", "bright_black"),
                (f"{metric.show(latest):>9}", "bold red" if is_alarming else "bold"),
                (" ▲" if is_alarming else "  ", colour),
                (spark(course, min(width - 25, 40)), colour),
            )
        )
    return box("Learning", rows, width, height)


def curve(state: RunState, width: int, height: int) -> list[Row]:
    """Draw the curves of accuracy or loss over steps, of training and validation in one chart."""
    title, *names = CURVES[_algorithm(state)]
    cells_wide = width - 4 - AXIS
    cells_high = height - 4
    series = [_thin(state.series(name), 2 * cells_wide) for name in names]
    bounds = (0.0, 1.0)
    if title != "Accuracy":
        bounds = _bounds([y for _, y in chain.from_iterable(series)])
    labels = {0: bounds[1], cells_high // 2: sum(bounds) / 2, cells_high - 1: bounds[0]}
    rows = []
    for index, line in enumerate(chart(series, cells_wide, cells_high, bounds)):
        label = f"{labels[index]:>{AXIS - 2}.2f} ┤" if index in labels else " " * (AXIS - 1) + "│"
        cells: list[Part] = []
        for character, series_index in line:
            cells.append((character, STYLES[series_index]) if series_index >= 0 else character)
        rows.append(row((label, "bright_black"), *cells))
    rows.append(row((" " * (AXIS - 1) + "└" + "─" * cells_wide, "bright_black")))
    rows.append(
        row(" " * AXIS, ("━ train", STYLES[0]), "  ", ("━ validation", STYLES[1]), ("  by step", "bright_black"))
    )
    ends: list[int] = []
    for steps in (state.steps.steps, state.validations.steps):
        if steps:
            ends += [steps[0], steps[-1]]
    aside = f"step {min(ends)} to {max(ends)}" if ends else ""
    return box(title, rows[-(height - 2) :], width, height, aside)


def _thin(points: Points, count: int) -> Points:
    return list(zip(resample([x for x, _ in points], count), resample([y for _, y in points], count)))


def _bounds(values: list[float]) -> tuple[float, float]:
    """Return the lowest and the highest value of a curve's axis."""
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if low == high:
        # A constant curve is flat at the bottom, like a constant sparkline.
        return low, low + 1.0
    margin = 0.05 * (high - low)
    return low - margin, high + margin
