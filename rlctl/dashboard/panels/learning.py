"""Panels of learning: a row for each metric, most telling first, and the curve of accuracy (grpo) or loss (sft)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rlctl.dashboard.formats import error_factor, number, percent
from rlctl.dashboard.panels.canvas import Part, Row, box, row
from rlctl.dashboard.panels.draw import Points, chart, resample, spark
from rlctl.dashboard.state import RunState

MISMATCH, PARITY = "mismatch/token_mult_prob_error", "mismatch/parity"


@dataclass(frozen=True)
class Metric:
    """One row of the panel."""

    label: str
    # With a slash at its end: each metric of the newest step that begins so, a row each, by the rest of its name.
    name: str
    show: Callable[[float | None], str] = number
    style: str = "cyan"
    # Shown only while it is above 0, and then before all others.
    failure: bool = False
    # Shown only if it was ever above 0.
    used: bool = False


METRICS = {
    "grpo": (
        Metric("rew failed", "reward/failed_share", percent, "bold red", failure=True),
        Metric("val failed", "validation/failed_rewards", style="bold red", failure=True),
        Metric("env failed", "environment/failed", style="bold red", failure=True),
        Metric("reward", "reward/mean", style="green"),
        Metric("accuracy", "reward/accuracy", percent, "green"),
        Metric("validation", "validation/accuracy", percent, "magenta"),
        Metric("loss", "loss/policy"),
        Metric("KL", "loss/kl"),
        Metric("grad norm", "train/grad_norm"),
        Metric("length", "length/mean"),
        Metric("truncated", "length/truncated", percent),
        Metric("mismatch", MISMATCH, error_factor),
        Metric("parity", PARITY, error_factor),
        Metric("turns", "environment/turns"),
        Metric("tool calls", "environment/tool_calls", used=True),
        Metric("tool error", "environment/tool_errors", percent, used=True),
        Metric("malformed", "environment/malformed_calls", percent, used=True),
        Metric("", "environment/endings/", percent),
        Metric("entropy", "loss/entropy"),
        Metric("clip low", "ratio/clipped_low", percent),
        Metric("clip high", "ratio/clipped_high", percent),
        Metric("uniform", "groups/uniform", percent),
        Metric("wasted", "tokens/wasted", percent),
        Metric("missing", "groups/missing"),
        Metric("pass@k", "validation/pass_at_k", percent, "magenta"),
        Metric("learn rate", "train/lr"),
    ),
    "sft": (
        Metric("val failed", "validation/failed_rewards", style="bold red", failure=True),
        Metric("loss", "loss/nll", style="green"),
        Metric("validation", "validation/loss", style="magenta"),
        Metric("accuracy", "validation/accuracy", percent, "magenta"),
        Metric("pass@k", "validation/pass_at_k", percent, "magenta"),
        Metric("reward", "validation/reward", style="magenta"),
        Metric("grad norm", "train/grad_norm"),
        Metric("learn rate", "train/lr"),
        Metric("tokens", "tokens/trained"),
    ),
}
# Explanations of metrics in one line; the longest that fits is shown.
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
    "grpo": ("Accuracy", "reward/accuracy", "validation/accuracy"),
    "sft": ("Loss", "loss/nll", "validation/loss"),
}
STYLES = ("green", "bold magenta")
# Cells of the curve's axis labels.
AXIS = 7


def metrics_of(state: RunState) -> list[Metric]:
    """Return the failures while they last, then the metrics that have a value."""
    listed = [
        replace(metric, label=metric.label or name.rpartition("/")[2], name=name)
        for metric in METRICS.get(state.algorithm, METRICS["grpo"])
        for name in (_family(state, metric.name) if metric.name.endswith("/") else [metric.name])
        if not metric.used or any(state.values(name))
    ]
    failures = [metric for metric in listed if metric.failure and (state.latest(metric.name) or 0) > 0]
    return failures + [metric for metric in listed if not metric.failure and state.latest(metric.name) is not None]


def _family(state: RunState, beginning: str) -> list[str]:
    return [name for name in state.last if name.startswith(beginning)]


def legend(state: RunState, width: int) -> str:
    """Return an explanation of the metrics within `width` cells; empty where that is too narrow, or none needs it."""
    kind = "async" if "age/max" in state.last else state.algorithm
    return next((text for text in LEGENDS.get(kind, ()) if len(text) <= width), "")


def learning(state: RunState, width: int, height: int) -> list[Row]:
    """Draw a row for each metric: label, newest value, alarm, course."""
    # Tokens of older weights differ from the trainer's by its learning since, tokens under top_p and top_k by the cut.
    # The bound is for the parity there. The ages panel shows older tokens apart.
    rows = []
    for metric in metrics_of(state)[: height - 2]:
        value, values = state.latest(metric.name), state.values(metric.name)
        exceeded = metric.name == state.judged_mismatch and value is not None and value > state.mismatch_bound
        alarmed = metric.failure or exceeded
        colour = "bold red" if alarmed else metric.style
        # A series that changes by less than is shown looks constant.
        constant = bool(values) and metric.show(min(values)) == metric.show(max(values))
        rows.append(
            row(
                (f"{metric.label:<10}", "bright_black"),
                (f"{metric.show(value):>9}", "bold red" if alarmed else "bold"),
                (" ▲" if alarmed else "  ", colour),
                (spark([0.0] * len(values) if constant else values, min(width - 25, 40)), colour),
            )
        )
    return box("Learning", rows, width, height)


def curve(state: RunState, width: int, height: int) -> list[Row]:
    """Draw accuracy or loss over steps, train and validation together."""
    title, *names = CURVES.get(state.algorithm, CURVES["grpo"])
    cells_wide, cells_high = width - 4 - AXIS, height - 4
    series = [_thin(state.series(name), 2 * cells_wide) for name in names]
    bounds = (0.0, 1.0) if title == "Accuracy" else _bounds([y for points in series for _, y in points])
    labels = {0: bounds[1], cells_high // 2: sum(bounds) / 2, cells_high - 1: bounds[0]}
    rows = []
    for index, line in enumerate(chart(series, cells_wide, cells_high, bounds)):
        label = f"{labels[index]:>{AXIS - 2}.2f} ┤" if index in labels else " " * (AXIS - 1) + "│"
        cells: list[Part] = [(character, STYLES[one]) if one >= 0 else character for character, one in line]
        rows.append(row((label, "bright_black"), *cells))
    rows.append(row((" " * (AXIS - 1) + "└" + "─" * cells_wide, "bright_black")))
    rows.append(
        row(" " * AXIS, ("━ train", STYLES[0]), "  ", ("━ validation", STYLES[1]), ("  by step", "bright_black"))
    )
    ends = [steps[end] for steps in (state.steps.steps, state.validations.steps) if steps for end in (0, -1)]
    aside = f"step {min(ends)} to {max(ends)}" if ends else ""
    return box(title, rows[-(height - 2) :], width, height, aside)


def _thin(points: Points, count: int) -> Points:
    return list(zip(resample([x for x, _ in points], count), resample([y for _, y in points], count)))


def _bounds(values: list[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        # Flat at the bottom, as a constant sparkline.
        return low, low + 1.0
    margin = 0.05 * (high - low)
    return low - margin, high + margin
