"""How fast and how busy: the three throughputs, idle shares, memory and device use."""

from rlctl.dashboard.formats import NONE, gib, number, percent
from rlctl.dashboard.panels.canvas import Row, box, row
from rlctl.dashboard.panels.draw import bar, spark
from rlctl.dashboard.state import RunState


def throughput(state: RunState, width: int, height: int) -> list[Row]:
    names = ("training",) if state.algorithm == "sft" else ("effective", "training", "generation")
    rows = [_rate(state, name, width - 4) for name in names]
    if (share := state.latest("throughput/mfu")) is not None:
        rows.append(_course(state, "MFU", "throughput/mfu", percent(share), "blue", width - 4))
    return box("Throughput", rows, width, height, "tokens/s/device")


def balance(state: RunState, width: int, height: int) -> list[Row]:
    return box("Idle", _idle_rows(state, width - 4), width, height, "share of the step")


def devices(state: RunState, width: int, height: int) -> list[Row]:
    return box("Memory", _memory_rows(state, width - 4), width, height)


def balance_and_devices(state: RunState, width: int, height: int) -> list[Row]:
    """Both in one box, for narrow terminals."""
    memory = [
        f"{side} {value:.3g}"
        for side in ("trainer", "engine")
        if (value := state.latest(f"memory/{side}_gib")) is not None
    ]
    used = state.latest("device/utilization")
    rows = [*_idle_rows(state, width - 4), row(("GiB   ", "bright_black"), " · ".join(memory) or NONE)]
    return box("Idle and memory", rows, width, height, "" if used is None else f"device use {percent(used)}")


def _rate(state: RunState, name: str, width: int) -> Row:
    key = f"throughput/{name}"
    value = state.generated(key) if name == "generation" else state.latest(key)
    return _course(state, name, key, number(value), "blue", width)


def _course(state: RunState, label: str, name: str, shown: str, style: str, width: int) -> Row:
    return row(
        (f"{label:<11}", "bright_black"),
        (f"{shown:>8}", "bold"),
        "  ",
        (spark(state.values(name), min(width - 21, 40)), style),
    )


def _idle_rows(state: RunState, width: int) -> list[Row]:
    """A bar a side, as long as it was idle."""
    sides = [("trainer", "green", state.latest("idle/trainer"))]
    if state.algorithm != "sft":
        sides.append(("generator", "blue", state.generated("idle/generator")))
    room, rows = max(0, width - 20), []
    for side, style, share in sides:
        idle = "" if share is None else bar(share, room)
        rest = "" if share is None else "░" * (room - len(idle))
        name, shown = (f"{side:<10}", "bright_black"), (f"{percent(share):>6}", "bold")
        rows.append(row(name, shown, "  ", (idle, style), (rest, "bright_black")))
    return rows


def _memory_rows(state: RunState, width: int) -> list[Row]:
    rows = []
    for side, label in (("trainer", "trainer rank"), ("engine", "engine"), ("driver", "driver")):
        if (value := state.latest(f"memory/{side}_gib")) is not None:
            rows.append(row((f"{label:<13}", "bright_black"), (f"{gib(value):>9}", "bold")))
    if (used := state.latest("device/utilization")) is not None:
        meter = (bar(used, max(0, width - 25)), "blue")
        rows.append(row((f"{'device use':<13}", "bright_black"), (f"{percent(used):>9}", "bold"), "  ", meter))
    return rows
