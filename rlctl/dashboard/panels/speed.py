"""Panels of speed: step time by phase, the three throughputs, idle shares, memory and device use."""

from rlctl.dashboard.formats import NONE, duration, gib, number, percent
from rlctl.dashboard.panels.canvas import Row, box, row
from rlctl.dashboard.panels.draw import bar, spark
from rlctl.dashboard.state import RunState
from rlctl.grpo.metric_rows import IDLEST_ENGINE, MEDIAN_ENGINE_RATE, SLOWEST_ENGINE, SLOWEST_ENGINE_RATE
from rlctl.preflight.declared_columns import COLUMN_PHASES
from rlctl.telemetry.clock import STEP_SECONDS
from rlctl.telemetry.resource_monitor import UTILIZATION
from rlctl.telemetry.throughput import GENERATOR_IDLE, MFU, TRAINER_IDLE

# Number of last steps for means.
RECENT = 20
# Phases in the order of a step.
ORDER = ("data", "generation", "reward", "refit", *COLUMN_PHASES, "advantage", "train", "validation", "checkpoint")
STYLE = {
    "generation": "blue",
    "train": "green",
    "refit": "magenta",
    **dict.fromkeys(COLUMN_PHASES, "cyan"),
    "critic": "bright_green",
    "reward": "yellow",
    "validation": "bright_blue",
    "checkpoint": "bright_cyan",
}
# Phase -> (seconds in the last step, mean seconds of the recent steps).
Times = dict[str, tuple[float, float]]
# Kind of a process, as in memory/NAME_gib -> its label. Any other kind is a frozen model that engines score with.
_PROCESSES = {"trainer": "trainer rank", "engine": "engine", "driver": "driver"}


def timing(state: RunState, width: int, height: int) -> list[Row]:
    """Draw a bar for each phase: solid for the last step, and shaded up to the mean of recent steps."""
    last = state.latest(STEP_SECONDS.name)
    mean = state.mean(STEP_SECONDS.name, RECENT)
    aside = f"last {duration(last)} · mean {duration(mean)}" if last is not None else ""
    times = phase_times(state)
    if len(times) > height - 2:
        times = _merge_smallest(times, height - 2)
    scale = max(map(max, times.values()), default=0.0)
    label_width = max([11, *(len(name) for name in times)])
    room = width - 20 - label_width
    rows = []
    for name, (last_seconds, mean_seconds) in times.items():
        solid = bar(last_seconds / scale, room) if scale > 0 else ""
        mean_cells = round(mean_seconds / scale * room) if scale > 0 else 0
        colour = STYLE.get(name, "white")
        rows.append(
            row(
                (f"{name.replace('_', ' '):<{label_width}}", "bright_black"),
                (f"{duration(last_seconds) if last_seconds else NONE:>7}", "bold"),
                f"{duration(mean_seconds):>7}  ",
                (solid, colour),
                ("░" * (mean_cells - len(solid)), colour),
            )
        )
    return box("Step time", rows, width, height, aside)


def _merge_smallest(times: Times, limit: int) -> Times:
    """Return at most `limit` phases. The smallest phases are merged to one named `rest`."""
    largest = set(sorted(times, key=lambda name: -max(times[name]))[: max(0, limit - 1)])
    merged: Times = {}
    rest_last = 0.0
    rest_mean = 0.0
    for name, (last, mean) in times.items():
        if name in largest:
            merged[name] = (last, mean)
        else:
            rest_last += last
            rest_mean += mean
    return {**merged, "rest": (rest_last, rest_mean)}


def phase_times(state: RunState) -> Times:
    """Return the times of all phases, in the order of a step."""
    recent = state.steps.recent(RECENT)
    names: set[str] = set()
    for record in recent:
        names.update(key.removeprefix("time/") for key in record if key.startswith("time/"))
    names.discard("step")

    def sort_key(name: str) -> tuple[int, str]:
        # Phases that are not in ORDER come after it by name, and `other` last.
        if name == "other":
            return len(ORDER) + 1, name
        return (ORDER.index(name) if name in ORDER else len(ORDER)), name

    times: Times = {}
    for name in sorted(names, key=sort_key):
        seconds = [float(record.get(f"time/{name}", 0.0)) for record in recent]
        times[name] = (seconds[-1], sum(seconds) / len(seconds))
    return times


def throughput(state: RunState, width: int, height: int) -> list[Row]:
    """Draw the throughputs of the run's algorithm, and MFU if it is known."""
    rows = []
    for name in ("training",) if state.algorithm == "sft" else ("effective", "training", "generation"):
        key = f"throughput/{name}"
        rate = state.latest_of_generator(key) if name == "generation" else state.latest(key)
        rows.append(_course(state, name, key, number(rate), width - 4))
    if (share := state.latest(MFU.name)) is not None:
        rows.append(_course(state, "MFU", MFU.name, percent(share), width - 4))
    return box("Throughput", rows, width, height, "tokens/s/device", _engines(state))


def _engines(state: RunState) -> str:
    """Return a text on the median and the slowest engine's throughput; empty for a single engine."""
    median = state.latest(MEDIAN_ENGINE_RATE.name)
    slowest = state.latest(SLOWEST_ENGINE_RATE.name)
    if median is None or slowest is None:
        return ""
    return f"engines {number(median)}, slowest {number(slowest)} (#{state.latest(SLOWEST_ENGINE.name):.0f})"


def _course(state: RunState, label: str, name: str, latest: str, width: int) -> Row:
    course = (spark(state.values(name), min(width - 21, 40)), "blue")
    return row((f"{label:<11}", "bright_black"), (f"{latest:>8}", "bold"), "  ", course)


def idle(state: RunState, width: int, height: int) -> list[Row]:
    """Draw the idle share of each side and frozen model, and that of the most idle engine if there are several."""
    rows = _idle_rows(state, width - 4)
    for model in scoring_kinds(state):
        rows.append(_share_row(model[:9], "blue", state.latest(f"idle/{model}"), width - 4))
    greatest_share = state.latest(IDLEST_ENGINE.name)
    if greatest_share is not None:
        rows.append(_share_row("idlest", "blue", greatest_share, width - 4))
    return box("Idle", rows, width, height, "share of the step")


def memory(state: RunState, width: int, height: int) -> list[Row]:
    """Draw the memory of each kind of process, and the utilization of the devices."""
    rows = []
    for kind in process_kinds(state):
        label = _PROCESSES.get(kind, kind)[:12]
        used_gib = state.latest(f"memory/{kind}_gib") or 0.0
        rows.append(row((f"{label:<13}", "bright_black"), (f"{gib(used_gib):>9}", "bold")))
    if (used := state.latest(UTILIZATION.name)) is not None:
        meter = (bar(used, max(0, width - 29)), "blue")
        rows.append(row((f"{'device use':<13}", "bright_black"), (f"{percent(used):>9}", "bold"), "  ", meter))
    return box("Memory", rows, width, height)


def idle_and_memory(state: RunState, width: int, height: int) -> list[Row]:
    """Draw idle shares and memory in one box, for narrow terminals."""
    memory_parts = []
    for side in ("trainer", "engine"):
        used_gib = state.latest(f"memory/{side}_gib")
        if used_gib is not None:
            memory_parts.append(f"{side} {used_gib:.3g}")
    used = state.latest(UTILIZATION.name)
    rows = _idle_rows(state, width - 4)
    rows.append(row(("GiB   ", "bright_black"), " · ".join(memory_parts) or NONE))
    return box("Idle and memory", rows, width, height, "" if used is None else f"device use {percent(used)}")


def _idle_rows(state: RunState, width: int) -> list[Row]:
    rows = [_share_row("trainer", "green", state.latest(TRAINER_IDLE.name), width)]
    if state.algorithm != "sft":
        generator_idle = state.latest_of_generator(GENERATOR_IDLE.name)
        rows.append(_share_row("generator", "blue", generator_idle, width))
    return rows


def process_kinds(state: RunState) -> list[str]:
    """Return the kinds of processes with known memory: trainer, engine, each frozen model on engines, driver."""
    metrics = [name.removeprefix("memory/") for name in state.steps.names if name.startswith("memory/")]
    kinds = [name.removesuffix("_gib") for name in metrics]
    return sorted(kinds, key=lambda kind: (kind == "driver", kind not in _PROCESSES, kind != "trainer", kind))


def _share_row(name: str, style: str, share: float | None, width: int) -> Row:
    room = max(0, width - 20)
    drawn = "" if share is None else bar(share, room)
    rest = "" if share is None else "░" * (room - len(drawn))
    number = (f"{percent(share):>6}", "bold")
    return row((f"{name:<10}", "bright_black"), number, "  ", (drawn, style), (rest, "bright_black"))


def scoring_kinds(state: RunState) -> list[str]:
    """Return the frozen models with known memory of their engines."""
    return [kind for kind in process_kinds(state) if kind not in _PROCESSES]
