"""Panels of speed: step time by phase, the three throughputs, idle shares, memory and device use."""

from rlctl.dashboard.formats import NONE, duration, gib, number, percent
from rlctl.dashboard.panels.canvas import Row, box, row
from rlctl.dashboard.panels.draw import bar, spark
from rlctl.dashboard.state import RunState
from rlctl.grpo.metric_rows import IDLEST_ENGINE, SLOWEST_ENGINE
from rlctl.telemetry.clock import STEP_SECONDS
from rlctl.telemetry.resource_monitor import UTILIZATION
from rlctl.telemetry.throughput import GENERATOR_IDLE, MFU, TRAINER_IDLE

RECENT = 20
ORDER = ("data", "generation", "reward", "refit", "log_probs", "advantage", "train", "validation", "checkpoint")
STYLE = {
    "generation": "blue",
    "train": "green",
    "refit": "magenta",
    "log_probs": "cyan",
    "reward": "yellow",
    "validation": "bright_blue",
    "checkpoint": "bright_cyan",
}
# Phase -> (seconds in the last step, mean seconds of the recent steps).
Times = dict[str, tuple[float, float]]


def timing(state: RunState, width: int, height: int) -> list[Row]:
    """Draw a bar for each phase, the last step in full and the mean of recent steps behind it."""
    last, mean = state.latest(STEP_SECONDS.name), state.mean(STEP_SECONDS.name, RECENT)
    aside = f"last {duration(last)} · mean {duration(mean)}" if last is not None else ""
    times = phase_times(state)
    if len(times) > height - 2:
        # The smallest phases share one row.
        kept = set(sorted(times, key=lambda name: -max(times[name]))[: max(0, height - 3)])
        small = [pair for name, pair in times.items() if name not in kept]
        rest = (sum(last for last, _ in small), sum(mean for _, mean in small))
        times = {**{name: pair for name, pair in times.items() if name in kept}, "rest": rest}
    scale = max((seconds for pair in times.values() for seconds in pair), default=0.0)
    label = max([11, *(len(name) for name in times)])
    room, rows = width - 20 - label, []
    for name, (last, mean) in times.items():
        solid = bar(last / scale, room) if scale > 0 else ""
        behind = round(mean / scale * room) if scale > 0 else 0
        colour = STYLE.get(name, "white")
        rows.append(
            row(
                (f"{name.replace('_', ' '):<{label}}", "bright_black"),
                (f"{duration(last) if last else NONE:>7}", "bold"),
                f"{duration(mean):>7}  ",
                (solid, colour),
                ("░" * (behind - len(solid)), colour),
            )
        )
    return box("Step time", rows, width, height, aside)


def phase_times(state: RunState) -> Times:
    """Return the times of all phases, in the order of a step."""
    recent = state.steps.recent(RECENT)
    names = {key.removeprefix("time/") for record in recent for key in record if key.startswith("time/")} - {"step"}

    def place(name: str) -> tuple[int, str]:
        known = ORDER.index(name) if name in ORDER else len(ORDER)
        return (len(ORDER) + 1 if name == "other" else known, name)

    return {
        name: (
            float(recent[-1].get(f"time/{name}", 0.0)),
            sum(float(record.get(f"time/{name}", 0.0)) for record in recent) / len(recent),
        )
        for name in sorted(names, key=place)
    }


def throughput(state: RunState, width: int, height: int) -> list[Row]:
    """Draw the throughputs that the algorithm has, and MFU where it is known."""
    rows = []
    for name in ("training",) if state.algorithm == "sft" else ("effective", "training", "generation"):
        key = f"throughput/{name}"
        value = state.generated(key) if name == "generation" else state.latest(key)
        rows.append(_course(state, name, key, number(value), width - 4))
    if (share := state.latest(MFU.name)) is not None:
        rows.append(_course(state, "MFU", MFU.name, percent(share), width - 4))
    return box("Throughput", rows, width, height, "tokens/s/device", _engines(state))


def _engines(state: RunState) -> str:
    """Return the median and the slowest of several engines, in words; empty for one."""
    median, slowest = (state.latest(f"engines/rate_{name}") for name in ("median", "slowest"))
    if median is None or slowest is None:
        return ""
    return f"engines {number(median)}, slowest {number(slowest)} (#{state.latest(SLOWEST_ENGINE.name):.0f})"


def _course(state: RunState, label: str, name: str, shown: str, width: int) -> Row:
    course = (spark(state.values(name), min(width - 21, 40)), "blue")
    return row((f"{label:<11}", "bright_black"), (f"{shown:>8}", "bold"), "  ", course)


def idle(state: RunState, width: int, height: int) -> list[Row]:
    """Draw a bar for each side, as long as it was idle, and one for the most idle of several engines."""
    most = state.latest(IDLEST_ENGINE.name)
    worst = [] if most is None else [_share_row("idlest", "blue", most, width - 4)]
    return box("Idle", [*_idle_rows(state, width - 4), *worst], width, height, "share of the step")


def memory(state: RunState, width: int, height: int) -> list[Row]:
    """Draw the memory of each kind of process, and how busy the devices are."""
    rows = []
    for side, label in (("trainer", "trainer rank"), ("engine", "engine"), ("driver", "driver")):
        if (value := state.latest(f"memory/{side}_gib")) is not None:
            rows.append(row((f"{label:<13}", "bright_black"), (f"{gib(value):>9}", "bold")))
    if (used := state.latest(UTILIZATION.name)) is not None:
        meter = (bar(used, max(0, width - 29)), "blue")
        rows.append(row((f"{'device use':<13}", "bright_black"), (f"{percent(used):>9}", "bold"), "  ", meter))
    return box("Memory", rows, width, height)


def idle_and_memory(state: RunState, width: int, height: int) -> list[Row]:
    """Draw both in one box, for narrow terminals."""
    held = [
        f"{side} {value:.3g}"
        for side in ("trainer", "engine")
        if (value := state.latest(f"memory/{side}_gib")) is not None
    ]
    used = state.latest(UTILIZATION.name)
    rows = [*_idle_rows(state, width - 4), row(("GiB   ", "bright_black"), " · ".join(held) or NONE)]
    return box("Idle and memory", rows, width, height, "" if used is None else f"device use {percent(used)}")


def _idle_rows(state: RunState, width: int) -> list[Row]:
    sides = [("trainer", "green", state.latest(TRAINER_IDLE.name))]
    if state.algorithm != "sft":
        sides.append(("generator", "blue", state.generated(GENERATOR_IDLE.name)))
    return [_share_row(*side, width) for side in sides]


def _share_row(name: str, style: str, share: float | None, width: int) -> Row:
    room = max(0, width - 20)
    drawn = "" if share is None else bar(share, room)
    rest = "" if share is None else "░" * (room - len(drawn))
    shown = (f"{percent(share):>6}", "bold")
    return row((f"{name:<10}", "bright_black"), shown, "  ", (drawn, style), (rest, "bright_black"))
