"""Trackers of a run, which get the numbers of metrics.jsonl, and groups of rollouts as text, and never end it.

A tracker is a class that is called with the run directory, the resolved config and the keys of its entry. It has
`write(kind, step, metrics)` (kind: step or validation) and `close()`, and it may have `samples(purpose, step, groups)`
(purpose: train or validation; groups: as in rollouts.jsonl).

The first error of a tracker, at import, start or any write, is one warning event, and that tracker is off.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.config.plugins import TRACKERS
from rlctl.config.telemetry_schema import TrackerSection, UserTrackerSection
from rlctl.telemetry.events import EventLog, Tracker
from rlctl.telemetry.jsonl import Record
from rlctl.utils.plugins import load_object


def open_trackers(
    sections: Sequence[TrackerSection], run: Path, config: Mapping[str, Any], events: EventLog
) -> list[Tracker]:
    """Return the trackers of a config. run: the run directory. config: the resolved one as plain containers."""
    return [Guarded(section.name, partial(_make, section, run, config), events) for section in sections]


def _make(section: TrackerSection, run: Path, config: Mapping[str, Any]) -> Any:
    options = section.further if isinstance(section, UserTrackerSection) else asdict(section)
    options = {key: value for key, value in options.items() if key != "name"}
    return load_object(TRACKERS.get(section.name, section.name))(run, config, **options)


class Guarded:
    """A tracker that is dropped with one warning at its first failure."""

    def __init__(self, name: str, make: Callable[[], Any], events: EventLog) -> None:
        self._name = name
        self._events = events
        self._tracker: Any = None
        self._try(lambda: setattr(self, "_tracker", make()))

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        if (tracker := self._tracker) is not None:
            self._try(lambda: tracker.write(kind, step, metrics))

    def samples(self, purpose: str, step: int, groups: Sequence[Record]) -> None:
        """Pass groups of rollouts on to a tracker that takes them."""
        if (take := getattr(self._tracker, "samples", None)) is not None:
            self._try(lambda: take(purpose, step, groups))

    def close(self) -> None:
        if (tracker := self._tracker) is not None:
            self._try(tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._tracker = None
            missing = isinstance(error, ImportError) and self._name in TRACKERS
            hint = f"; pip install 'rlctl[{self._name}]'" if missing else ""
            what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self._events.emit("warning", what=f"{self._name} is off from now on: {what}{hint}")
