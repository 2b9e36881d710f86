"""How old an asynchronous run's groups are: those just trained, and those on their way to the next steps."""

from rlctl.dashboard.formats import NONE, error_factor, percent
from rlctl.dashboard.panels.canvas import Row, box, row
from rlctl.dashboard.panels.draw import bar
from rlctl.dashboard.state import RunState


def bound(state: RunState) -> int | None:
    """The run's bound on age in steps; None for a synchronous run, and before the first step."""
    ages = 0
    while state.latest(f"buffer/age_{ages}") is not None:
        ages += 1
    return ages - 1 if ages else None


def ages(state: RunState, width: int, height: int) -> list[Row]:
    """A row an age: groups trained in the last step, groups on their way, mismatch of tokens of that age."""
    oldest = bound(state) or 0
    shown = [_of(state, age) for age in range(oldest + 1)]
    room = height - 3
    if len(shown) > room >= 1:
        rest = shown[room - 1 :]
        worst = max((one[2] for one in rest if one[2] is not None), default=None)
        shown = [*shown[: room - 1], (sum(one[0] for one in rest), sum(one[1] for one in rest), worst)]
    cells = max(0, (width - 4 - 4 - 2 * 6 - 10) // 2)
    scale = max((value for trained, waiting, _ in shown for value in (trained, waiting)), default=0.0)
    head = f"{'age':<4}{'trained':<{cells + 6}}{'in flight':<{cells + 6}}{'mismatch':>10}"
    rows = [row((head, "bright_black"))]
    for age, (trained, waiting, error) in enumerate(shown):
        more = age == len(shown) - 1 and len(shown) <= oldest
        rows.append(
            row(
                (f"{f'{age}+' if more else age:<4}", "bright_black"),
                *_counted(trained, scale, cells, "green"),
                *_counted(waiting, scale, cells, "blue"),
                (f"{error_factor(error):>10}" if error is not None else f"{NONE:>10}", ""),
            )
        )
    mixed = state.latest("age/mixed")
    return box("Age of groups", rows, width, height, f"≤ {oldest} · mixed {percent(mixed)}")


def _of(state: RunState, age: int) -> tuple[float, float, float | None]:
    last = state.last
    error = last.get(f"mismatch/age_{age}")
    return float(last.get(f"age/groups_{age}", 0.0)), float(last.get(f"buffer/age_{age}", 0.0)), error


def _counted(value: float, scale: float, cells: int, style: str) -> tuple[tuple[str, str], ...]:
    drawn = bar(value / scale, cells) if scale > 0 and value else ""
    return (f"{value:>4.0f} ", "bold"), (f"{drawn:<{cells}} ", style)
