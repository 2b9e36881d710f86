"""Panel of a rollout, for tall terminals: the best and the worst of the newest recorded group."""

import textwrap

from rlctl.dashboard.panels.canvas import Row, box, fit, place_side_by_side, row
from rlctl.dashboard.rollout_view import BAR, facts, headline, pieces, title_of
from rlctl.dashboard.state import RunState
from rlctl.telemetry.jsonl import Record
from rlctl.utils.safe_text import neutral

# Least width in cells of a panel with two rollouts.
TWO = 100
PROMPT_ROWS = 2


def rollout(state: RunState, width: int, limit: int) -> list[Row]:
    """Draw the best and, with room, the worst rollout of the newest group in at most `limit` rows."""
    group = state.sample
    inner = width - 4
    by_reward = sorted(group["rollouts"], key=lambda record: -(record.get("reward") or 0.0))
    chosen = by_reward[:1]
    if inner >= TWO and len(by_reward) > 1:
        chosen = [by_reward[0], by_reward[-1]]
    # A group has no prompt if the environment begins the chat.
    prompt = _wrap_lines(group["prompt"], inner)[:PROMPT_ROWS] if group.get("prompt") else []
    # Two blanks separate the columns.
    column_width = (inner - 2 * (len(chosen) - 1)) // len(chosen)
    columns = [_column(record, column_width, limit - 2 - len(prompt)) for record in chosen]
    column_height = max(map(len, columns))
    blocks: list[list[Row]] = []
    for column in columns:
        if blocks:
            blocks.append([row("  ")] * column_height)
        empty_rows: list[Row] = [[]] * (column_height - len(column))
        blocks.append([fit(line, column_width) for line in column + empty_rows])
    rows = [row((line, "bright_black")) for line in prompt]
    rows += place_side_by_side(*blocks)
    return box("Rollouts", rows, width, len(rows) + 2, title_of(group), f"all: rlctl runs rollouts {state.name}")


def _column(record: Record, width: int, limit: int) -> list[Row]:
    """Draw a rollout in at most `limit` rows. A last row "…" says that its text goes on."""
    rows = [row(*headline(record))]
    rows += [row((line, "bright_black")) for line in textwrap.wrap(facts(record), width)]
    for text, sampled in pieces(record):
        bar, style = (BAR, "") if sampled else ("  ", "bright_black")
        rows += [row((bar, "green"), (line, style)) for line in _wrap_lines(text, width - len(BAR))]
    return rows if len(rows) <= limit else [*rows[: limit - 1], row(("…", "bright_black"))]


def _wrap_lines(text: str, width: int) -> list[str]:
    """Return the lines of a text wrapped at `width` cells. Empty lines are kept."""
    wrapped = []
    for line in neutral(text).expandtabs(4).split("\n"):
        wrapped += textwrap.wrap(line, max(1, width), replace_whitespace=False) or [""]
    return wrapped
