"""Panel of a rollout, for tall terminals: the best and the worst of the newest recorded group."""

import textwrap

from rlctl.dashboard.panels.canvas import Row, beside, box, fit, row
from rlctl.dashboard.rollout_view import BAR, facts, headline, pieces, title_of
from rlctl.dashboard.state import RunState
from rlctl.telemetry.jsonl import Record
from rlctl.utils.safe_text import neutral

# Cells of a panel from which on two rollouts are shown.
TWO = 100
PROMPT_ROWS = 2


def rollout(state: RunState, width: int, most: int) -> list[Row]:
    """Draw one or two rollouts of the newest group in at most `most` rows, with the command for all."""
    group, inner = state.sample, width - 4
    order = sorted(group["rollouts"], key=lambda each: -(each.get("reward") or 0.0))
    chosen = [order[0], order[-1]] if inner >= TWO and len(order) > 1 else order[:1]
    # An environment may pose the task: the task then has no prompt.
    prompt = _wrapped(group["prompt"], inner)[:PROMPT_ROWS] if group.get("prompt") else []
    room = (inner - 2 * (len(chosen) - 1)) // len(chosen)
    columns = [_column(each, room, most - 2 - len(prompt)) for each in chosen]
    high = max(map(len, columns))
    first, *second = ([fit(line, room) for line in [*column, *([[]] * (high - len(column)))]] for column in columns)
    gap = [row("  ")] * high if second else []
    rows = [*(row((line, "bright_black")) for line in prompt), *beside(first, gap, *second)]
    return box("Rollouts", rows, width, len(rows) + 2, title_of(group), f"all: rlctl runs rollouts {state.name}")


def _column(one: Record, width: int, most: int) -> list[Row]:
    """Draw a rollout in at most `most` rows; "…" where its text goes on."""
    rows = [row(*headline(one)), *(row((line, "bright_black")) for line in textwrap.wrap(facts(one), width))]
    for text, sampled in pieces(one):
        bar, style = (BAR, "") if sampled else ("  ", "bright_black")
        rows += [row((bar, "green"), (line, style)) for line in _wrapped(text, width - len(BAR))]
    return rows if len(rows) <= most else [*rows[: most - 1], row(("…", "bright_black"))]


def _wrapped(text: str, width: int) -> list[str]:
    lines = neutral(text).expandtabs(4).split("\n")
    return [part for line in lines for part in textwrap.wrap(line, max(1, width), replace_whitespace=False) or [""]]
