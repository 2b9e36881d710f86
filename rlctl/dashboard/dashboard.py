"""Layout of the dashboard: draws a run's state as one screen of a terminal's size. Pure."""

from rlctl.dashboard.panels.asynchronous import age_bound, ages, timeline
from rlctl.dashboard.panels.canvas import Frame, Row, place_side_by_side
from rlctl.dashboard.panels.learning import curve, learning, legend, metrics_of
from rlctl.dashboard.panels.rollout import rollout
from rlctl.dashboard.panels.speed import idle, idle_and_memory, memory, phase_times, scoring_kinds, throughput, timing
from rlctl.dashboard.panels.status import HEIGHT, header, log, startup
from rlctl.dashboard.state import RunState
from rlctl.telemetry.resource_monitor import UTILIZATION
from rlctl.telemetry.throughput import MFU

# Least width in characters for three columns.
WIDE = 116
# Least width in characters for two columns. Narrower columns would cut numbers.
TWO_COLUMNS = 64
SPEED_HEIGHT = 5
# Least height of the events' panel.
LEAST_LOG = 3
# Least number of free rows for a panel with a rollout.
TALL = 16
# Number of free rows that this panel leaves to the events.
LOG_HEIGHT = 8
# Largest height of this panel.
MOST_ROLLOUT = 24
TIMELINE_HEIGHT = 6
# Height of the timeline without its axis, if there are few rows.
LEAST_TIMELINE = 4


def render(state: RunState, width: int, height: int) -> Frame:
    """Return the whole screen of at most `width` x `height` characters. Panels without room are left out."""
    rows = header(state, width)
    room = height - HEIGHT
    if not state.steps:
        # A row for each part, one for the first step's phase, and the frame. At least 6 rows are left to the events.
        startup_height = min(max(3, room - 6), len(state.startup) + 3)
        rows += startup(state, width, startup_height)
    elif width >= WIDE:
        rows += _wide(state, width, room)
    elif width < TWO_COLUMNS:
        learning_height = max(3, min(len(metrics_of(state)) + 2, room - SPEED_HEIGHT - LEAST_LOG))
        rows += [*learning(state, width, learning_height), *throughput(state, width, SPEED_HEIGHT)]
    else:
        rows += _narrow(state, width, room)
    free_rows = height - len(rows)
    if state.steps and state.sample.get("rollouts") and free_rows >= TALL:
        rows += rollout(state, width, min(free_rows - LOG_HEIGHT, MOST_ROLLOUT))
        free_rows = height - len(rows)
    if free_rows >= LEAST_LOG:
        rows += log(state, width, free_rows, legend(state, width - 5) if state.steps else "")
    return Frame(rows, width, height)


def _wide(state: RunState, width: int, room: int) -> list[Row]:
    """Draw three columns: above learning, its curve and step time; below throughput, idle shares and memory.

    An asynchronous run has its timeline and the ages of its groups in the middle. room: number of rows.
    """
    lower_height = _speed_height(state) + min(1, len(scoring_kinds(state)))
    oldest = age_bound(state)
    middle_height = 0
    if oldest is not None:
        # A row for each age, if at least 15 rows are left to the upper panels and the events.
        middle_height = min(max(TIMELINE_HEIGHT, oldest + 4), max(LEAST_TIMELINE, room - lower_height - 15))
    content_height = max(len(metrics_of(state)), len(phase_times(state)), 12) + 2
    upper_height = max(3, min(content_height, room - lower_height - middle_height - LEAST_LOG - 3))
    # The outer columns have equal widths.
    outer = width // 3
    inner = width - 2 * outer
    rows = place_side_by_side(
        learning(state, outer, upper_height), curve(state, inner, upper_height), timing(state, outer, upper_height)
    )
    if middle_height:
        rows += place_side_by_side(timeline(state, outer + inner, middle_height), ages(state, outer, middle_height))
    rows += place_side_by_side(
        throughput(state, outer, lower_height), idle(state, inner, lower_height), memory(state, outer, lower_height)
    )
    return rows


def _narrow(state: RunState, width: int, room: int) -> list[Row]:
    """Draw two columns: above learning and step time; below throughput, and idle shares with memory.

    An asynchronous run has its timeline in the middle. This shows the idle shares, so ages of groups take their panel.
    room: number of rows.
    """
    lower_height = _speed_height(state) if room > 24 else SPEED_HEIGHT
    content_height = len(metrics_of(state)) + 2
    is_asynchronous = age_bound(state) is not None
    middle_height = 0
    log_height = LEAST_LOG + 1
    if is_asynchronous:
        middle_height = TIMELINE_HEIGHT if room > 28 else LEAST_TIMELINE
        log_height = LEAST_LOG
    upper_height = max(3, min(content_height, room - lower_height - middle_height - log_height))
    left_width = width // 2
    right_width = width - left_width
    rows = place_side_by_side(learning(state, left_width, upper_height), timing(state, right_width, upper_height))
    if is_asynchronous:
        rows += timeline(state, width, middle_height)
    lower_right = ages if is_asynchronous else idle_and_memory
    rows += place_side_by_side(
        throughput(state, left_width, lower_height), lower_right(state, right_width, lower_height)
    )
    return rows


def _speed_height(state: RunState) -> int:
    """Return the height of the lower panels. A recorded MFU or device utilization takes one more row."""
    has_device_row = state.latest(MFU.name) is not None or state.latest(UTILIZATION.name) is not None
    return SPEED_HEIGHT + 1 if has_device_row else SPEED_HEIGHT
