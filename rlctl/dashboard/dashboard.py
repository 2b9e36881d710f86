"""The dashboard: a run's state as one screen, laid out for a terminal's size. Pure."""

from rlctl.dashboard.panels.asynchronous import age_bound, ages, timeline
from rlctl.dashboard.panels.canvas import Frame, Row, beside
from rlctl.dashboard.panels.learning import curve, learning, legend, metrics_of
from rlctl.dashboard.panels.rollout import rollout
from rlctl.dashboard.panels.speed import idle, idle_and_memory, memory, phase_times, throughput, timing
from rlctl.dashboard.panels.status import HEIGHT, header, log, startup
from rlctl.dashboard.state import RunState
from rlctl.telemetry.resource_monitor import UTILIZATION
from rlctl.telemetry.throughput import MFU

WIDE = 116
# Below this, numbers of two columns side by side would be cut.
TWO_COLUMNS = 64
SPEED_HEIGHT = 5
LEAST_LOG = 3
# Rows below the other panels from which on a rollout is shown; those left to the events; the most it takes.
TALL, LOG_HEIGHT, MOST_ROLLOUT = 16, 8, 24
TIMELINE_HEIGHT = 6
# Without the axis, where rows are few.
LEAST_TIMELINE = 4


def render(state: RunState, width: int, height: int) -> Frame:
    """Return the whole screen, at most `width` x `height`; the rest is left out."""
    rows = header(state, width)
    room = height - HEIGHT
    if not state.steps:
        upper = min(max(3, room - 6), len(state.startup) + 3)
        rows += startup(state, width, upper)
    elif width >= WIDE:
        rows += _wide(state, width, room)
    elif width < TWO_COLUMNS:
        upper = max(3, min(len(metrics_of(state)) + 2, room - SPEED_HEIGHT - LEAST_LOG))
        rows += [*learning(state, width, upper), *throughput(state, width, SPEED_HEIGHT)]
    else:
        rows += _narrow(state, width, room)
    left = height - len(rows)
    if state.steps and state.sample.get("rollouts") and left >= TALL:
        rows += rollout(state, width, min(left - LOG_HEIGHT, MOST_ROLLOUT))
        left = height - len(rows)
    if left >= LEAST_LOG:
        rows += log(state, width, left, legend(state, width - 5) if state.steps else "")
    return Frame(rows, width, height)


def _wide(state: RunState, width: int, room: int) -> list[Row]:
    """Draw three columns: learning, its curve, step time; below them throughput, idle, memory.

    An asynchronous run has its timeline and the ages of its groups between them.
    """
    lower = SPEED_HEIGHT + _has_device_row(state)
    oldest = age_bound(state)
    middle = 0 if oldest is None else min(max(TIMELINE_HEIGHT, oldest + 4), max(LEAST_TIMELINE, room - lower - 15))
    wanted = max(len(metrics_of(state)), len(phase_times(state)), 12) + 2
    upper = max(3, min(wanted, room - lower - middle - LEAST_LOG - 3))
    first = third = width // 3
    second = width - first - third
    return [
        *beside(learning(state, first, upper), curve(state, second, upper), timing(state, third, upper)),
        *(beside(timeline(state, first + second, middle), ages(state, third, middle)) if middle else []),
        *beside(throughput(state, first, lower), idle(state, second, lower), memory(state, third, lower)),
    ]


def _narrow(state: RunState, width: int, room: int) -> list[Row]:
    """Draw two columns: learning and step time; below them throughput, and idle with memory.

    An asynchronous run has its timeline between them, and ages in place of the idle shares, which the timeline shows.
    """
    lower = SPEED_HEIGHT + (_has_device_row(state) if room > 24 else 0)
    wanted = len(metrics_of(state)) + 2
    asynchronous = age_bound(state) is not None
    middle = (TIMELINE_HEIGHT if room > 28 else LEAST_TIMELINE) if asynchronous else 0
    upper = max(3, min(wanted, room - lower - middle - LEAST_LOG - (not asynchronous)))
    left = width // 2
    right = width - left
    return [
        *beside(learning(state, left, upper), timing(state, right, upper)),
        *(timeline(state, width, middle) if middle else []),
        *beside(throughput(state, left, lower), (ages if asynchronous else idle_and_memory)(state, right, lower)),
    ]


def _has_device_row(state: RunState) -> bool:
    """True where there is an MFU or a device's use to show, which takes one row more."""
    return state.latest(MFU.name) is not None or state.latest(UTILIZATION.name) is not None
