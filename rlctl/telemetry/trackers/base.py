"""Trackers of a run, for example Weights & Biases. They get its metrics and groups of rollouts, and never end it.

A tracker is a class that is called with the run directory, the resolved config and the keys of its entry in the config.
It has `write(kind, step, metrics)` (kind: step, validation or checkpoint) and `close()`, and it may have
`samples(purpose, step, groups)` (purpose: train or validation; groups: as in rollouts.jsonl).

If a call of a tracker raises, this tracker misses the record; metrics.jsonl has it. Each cause is warned of once, and
the number of missed records is a warning at the end. The next record is tried. From the second failure in a row on,
the tracker pauses for 1 s, 2 s, 4 s and so on up to 5 minutes, and misses the records of the pause too. A tracker that
fails to start is started again in the same way, unless its package is missing.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.config.plugin_options import call_options
from rlctl.config.plugins import TRACKER_ARGUMENTS, TRACKERS
from rlctl.config.telemetry_schema import TrackerSection, UserTrackerSection
from rlctl.telemetry.events import EventLog, Tracker
from rlctl.telemetry.jsonl import Record
from rlctl.utils.user_code import load_object, users_place

# The longest pause after several failures in a row.
_LONGEST_PAUSE_S = 300.0
# Number of different causes of failure that are warned of. Later causes count as missed records only.
_MOST_CAUSES = 5
_NUMBERS = "numbers"
_ROLLOUTS = "rollouts"
_FILES = {_NUMBERS: "metrics.jsonl", _ROLLOUTS: "rollouts.jsonl"}


def open_trackers(
    sections: Sequence[TrackerSection], run: Path, config: Mapping[str, Any], events: EventLog
) -> list[Tracker]:
    """Return the trackers of a run. run: the run directory. config: the resolved config as plain containers."""
    return [Guarded(section.name, partial(_make, section, run, config), events) for section in sections]


def _make(section: TrackerSection, run: Path, config: Mapping[str, Any]) -> Any:
    tracker = load_object(TRACKERS.get(section.name, section.name))
    if isinstance(section, UserTrackerSection):
        # [0]: the arguments. [1], the mistakes in them, is ignored: a check reported them, or the call below raises.
        return tracker(run, config, **call_options(tracker, TRACKER_ARGUMENTS, section.further)[0])
    options = {key: value for key, value in asdict(section).items() if key != "name"}
    return tracker(run, config, **options)


class _Attempts:
    """Number of failures in a row of one kind of call, and the end of the pause after them."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._failures = 0
        # Time at which the pause ends.
        self._pause_end = 0.0

    @property
    def is_due(self) -> bool:
        """True unless a pause is going on."""
        return self._now() >= self._pause_end

    def note_success(self) -> None:
        self._failures = 0

    def note_failure(self) -> None:
        """Begin a pause. The first failure has no pause, so that one bad value costs no other record."""
        if self._failures:
            self._pause_end = self._now() + min(2.0 ** min(self._failures - 1, 30), _LONGEST_PAUSE_S)
        self._failures += 1


class Guarded:
    """Wrapper of a tracker that catches its failures: it counts missed records and warns of each cause once."""

    def __init__(
        self, name: str, make: Callable[[], Any], events: EventLog, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the tracker by `make`. If that fails, `make` is called again with a later record."""
        self._name = name
        self._make = make
        self._events = events
        self._tracker: Any = None
        self._is_package_missing = False
        # Starting, numbers and groups fail independently of each other.
        self._attempts = {call: _Attempts(now) for call in ("start", _NUMBERS, _ROLLOUTS)}
        self._missed: Counter[str] = Counter()
        self._causes: set[str] = set()
        self._try_start()

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        self._try_call(_NUMBERS, f"{kind} {step}", lambda: self._tracker.write(kind, step, metrics))

    def samples(self, purpose: str, step: int, groups: Sequence[Record]) -> None:
        """Pass groups of rollouts to the tracker, if it has a method `samples`."""
        if self._tracker is None or hasattr(self._tracker, "samples"):
            self._try_call(_ROLLOUTS, f"{purpose} {step}", lambda: self._tracker.samples(purpose, step, groups))

    def close(self) -> None:
        """Close the tracker, and emit a warning with the number of records that it missed."""
        try:
            if self._tracker is not None:
                self._tracker.close()
        except Exception as error:
            self._warn(error, "at its end; its last records may be missing there")
        # Without this method, the tracker takes no rollouts, and so misses none.
        if not hasattr(self._tracker, "samples"):
            del self._missed[_ROLLOUTS]
        for kind, count in self._missed.items():
            self._events.emit(
                "warning", what=f"{self._name} missed the {kind} of {count} records; {_FILES[kind]} has them"
            )

    def _try_start(self) -> bool:
        """Start the tracker if it is not running and no pause is going on; return True if it is running."""
        attempts = self._attempts["start"]
        if self._tracker is None and not self._is_package_missing and attempts.is_due:
            try:
                self._tracker = self._make()
            except Exception as error:
                attempts.note_failure()
                self._is_package_missing = isinstance(error, ImportError)
                remedy = "it is started again with the next records"
                if self._is_package_missing:
                    hint = f"; pip install 'rlctl[{self._name}]'" if self._name in TRACKERS else ""
                    remedy = f"it is off{hint}"
                self._warn(error, f"at its start; {remedy}")
        return self._tracker is not None

    def _try_call(self, kind: str, record: str, call: Callable[[], None]) -> None:
        """Make a call of the tracker. Count the record as missed if a pause is going on, or if the call raises.

        kind: "numbers" or "rollouts". record: name of the record in a warning, for example "step 7".
        """
        attempts = self._attempts[kind]
        if not self._try_start() or not attempts.is_due:
            self._missed[kind] += 1
            return
        try:
            call()
            attempts.note_success()
        except Exception as error:
            attempts.note_failure()
            self._missed[kind] += 1
            self._warn(error, f"the {kind} of {record} are skipped there, and counted; the next are tried")

    def _warn(self, error: Exception, consequence: str) -> None:
        """Emit a warning, once for each cause. Errors whose texts differ in numbers alone have the same cause."""
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if ":" in self._name and (place := users_place(error)):
            text = f"{text} at {place}"
        cause = re.sub(r"\d+", "0", text)
        if cause not in self._causes and len(self._causes) < _MOST_CAUSES:
            self._causes.add(cause)
            self._events.emit("warning", what=f"{self._name} failed: {text}: {consequence}")
