"""The one curve a person came for: accuracy over steps (grpo) or loss (sft), train and held-out together."""

from rlctl.dashboard.panels.canvas import Part, Row, box, row
from rlctl.dashboard.panels.draw import Points, chart, resample
from rlctl.dashboard.state import RunState

CURVES = {
    "grpo": ("Accuracy", "reward/accuracy", "validation/accuracy"),
    "sft": ("Loss", "loss/nll", "validation/loss"),
}
STYLES = ("green", "bold magenta")
LABEL = 7


def curve(state: RunState, width: int, height: int) -> list[Row]:
    title, train, held_out = CURVES.get(state.algorithm, CURVES["grpo"])
    cells_wide, cells_high = width - 4 - LABEL, height - 4
    series = [_thin(state.series(name), 2 * cells_wide) for name in (train, held_out)]
    values = [y for points in series for _, y in points]
    bounds = (0.0, 1.0) if title == "Accuracy" else _bounds(values)
    picture = chart(series, cells_wide, cells_high, bounds)
    rows = [
        [*row((_label(index, cells_high, bounds), "bright_black")), *_coloured(line)]
        for index, line in enumerate(picture)
    ]
    legend = row(" " * LABEL, ("━ train", STYLES[0]), "  ", ("━ held-out", STYLES[1]), ("  by step", "bright_black"))
    axis = row((" " * (LABEL - 1) + "└" + "─" * cells_wide, "bright_black"))
    return box(title, [*rows, axis, legend][-(height - 2) :], width, height, _span(state))


def _span(state: RunState) -> str:
    ends = [steps[end] for steps in (state.steps.steps, state.validations.steps) if steps for end in (0, -1)]
    return f"step {min(ends)} to {max(ends)}" if ends else ""


def _label(index: int, height: int, bounds: tuple[float, float]) -> str:
    places = {0: bounds[1], height // 2: sum(bounds) / 2, height - 1: bounds[0]}
    return f"{places[index]:>{LABEL - 2}.2f} ┤" if index in places else " " * (LABEL - 1) + "│"


def _coloured(line: list[tuple[str, int]]) -> Row:
    parts: list[Part] = []
    for character, index in line:
        parts.append((character, STYLES[index]) if index >= 0 else character)
    return row(*parts)


def _thin(points: Points, count: int) -> Points:
    return list(zip(resample([x for x, _ in points], count), resample([y for _, y in points], count)))


def _bounds(values: list[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        # Flat at the bottom, as a constant sparkline.
        return low, low + 1.0
    margin = 0.05 * (high - low)
    return low - margin, high + margin
