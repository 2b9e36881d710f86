"""Facts of a run for a report: its state, its config with origins, its events, and samples of its rollouts.

Everything is read from the run directory. Damaged parts are left out, and named in remarks.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.config.compose import compose
from rlctl.config.errors import ConfigError
from rlctl.config.fields import schema_key, schema_keys
from rlctl.config.provenance import dump, leaves, plain
from rlctl.config.recorded_origins import recorded_origins
from rlctl.config.schema import KINDS
from rlctl.dashboard.event_text import describe
from rlctl.dashboard.formats import count
from rlctl.dashboard.rollout_view import about, facts, headline, pieces, title_of
from rlctl.dashboard.state import SILENT, RunState, read_state
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.jsonl import Record, damaged_lines, read_records
from rlctl.telemetry.rollouts_file import GroupPlace, index, read_groups

# Most steps with samples, groups of a step, rollouts of a group, and characters of a text.
MOST_STEPS = 24
MOST_GROUPS = {"train": 2, "validation": 6}
MOST_ROLLOUTS = 8
MOST_LETTERS = 3000
# Most characters of a run's samples as JSON.
MOST_SAMPLES = 400_000
MOST_EVENTS = 300
# Kinds of events that a report does not list.
_UNTOLD = {*SILENT, "validation_started", "processes"}
# Kinds of events that are marks on the chart of health.
HEALTH = {
    "warning",
    "error",
    "engine_lost",
    "engine_restarted",
    "engine_gone",
    "restart",
    "redrawn",
    "checkpoint",
    "run_ended",
}


@dataclass(frozen=True)
class ReportedEvent:
    """An event in words."""

    # Seconds since the run's first event.
    at_s: float
    # Step of the event, or else the last step finished before the event.
    step: int
    kind: str
    # Name of a health check, or else the kind, in words.
    label: str
    text: str


@dataclass(frozen=True)
class ConfigValue:
    """A value of a run's config."""

    # The value as YAML.
    text: str
    # File and line, or override, that set the value; empty for a default.
    origin: str


@dataclass(frozen=True)
class ReportedRun:
    """One run of a report."""

    # Name, unique in the report.
    name: str
    path: Path
    state: RunState
    config: dict[str, ConfigValue]
    events: list[ReportedEvent]
    # Purpose (train or validation) -> sampled groups, in the order of steps.
    samples: dict[str, list[Record]]
    # One line on each damaged, missing or unfinished part.
    remarks: list[str]


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Return the runs in these directories. If several have the same name, their paths are added to the names."""
    names = [folder.resolve().name for folder in folders]
    return [
        read_run(folder, name if names.count(name) == 1 else f"{name} ({folder.parent})")
        for folder, name in zip(folders, names)
    ]


def read_run(folder: Path, name: str) -> ReportedRun:
    """Return the run in a directory. Parts that cannot be read are left out, and named in remarks."""
    run = RunDir(folder)
    state = read_state(folder)
    state.name = name
    remarks = list(_remarks(run, state))
    config: dict[str, ConfigValue] = {}
    try:
        config = _config(run.config)
        if config and not any(value.origin for value in config.values()):
            remarks.append("config.yaml records no origins: the run is of an earlier version of rlctl")
    except ConfigError as error:
        remarks.append(f"its config is left out: {error.problems[0]}")
    events = _events(run.events, state)
    samples = {purpose: _samples(run.rollouts, purpose) for purpose in ("validation", "train")}
    return ReportedRun(
        name=name,
        path=folder,
        state=state,
        config=config,
        events=events,
        samples=samples,
        remarks=remarks,
    )


def meanings_of_keys() -> dict[str, str]:
    """Return the meaning of every key of a config. In the keys `N` stands for the number of a list's entry."""
    meanings: dict[str, str] = {}
    for kind in KINDS.values():
        meanings |= {key: field.metadata.get("doc", "") for key, field in schema_keys(kind)}
    return meanings


def meaning_of_key(key: str, meanings: dict[str, str]) -> str:
    """Return the meaning of a key; for an entry of a list without a meaning, the meaning of the list."""
    return meanings.get(schema_key(key)) or meanings.get(schema_key(key).removesuffix(".N"), "")


def _remarks(run: RunDir, state: RunState) -> Iterator[str]:
    """Yield a remark on each unfinished, damaged or missing part of a run."""
    if state.status in ("new", "running"):
        yield f"is under way: {count(state.step, 'step')} of {state.num_steps or '?'} done when this was written"
    if state.status == "died":
        yield "its driver is gone without a last word: what it had written is shown"
    for path in (run.events, run.metrics):
        if damaged := damaged_lines(path):
            yield f"{path.name}: without {count(damaged, 'damaged line')}"
        if not path.exists():
            yield f"has no {path.name}"
    if not state.steps:
        yield "has done no step yet, so there are no curves"


def _config(path: Path) -> dict[str, ConfigValue]:
    """Return the values of a config.yaml by dotted key. Raises ConfigError."""
    tree = compose(path, [])
    origins = recorded_origins(path)
    config = {}
    for key, node in leaves(tree):
        text = dump({"key": plain(node)}).removeprefix("key: ").rstrip("\n")
        config[key] = ConfigValue(text, origins.get(key, ""))
    return config


def _events(path: Path, state: RunState) -> list[ReportedEvent]:
    """Return the events of all attempts of a run in order."""
    records = [
        record for record in read_records(path) if "kind" in record and isinstance(record.get("time"), (int, float))
    ]
    begin = float(records[0]["time"]) if records else 0.0
    done_steps = state.steps.series("time")
    end_times = [end_time for _, end_time in done_steps]
    steps = [step for step, _ in done_steps]
    events = []
    for record in records:
        kind = str(record["kind"])
        if kind in _UNTOLD:
            continue
        time_s = float(record["time"])
        # An event without a step gets the last step that was done before it.
        num_done = bisect_right(end_times, time_s)
        step = steps[num_done - 1] if num_done else 0
        if isinstance(record.get("step"), int):
            step = record["step"]
        label = str(record.get("check") or kind).replace("_", " ")
        event = ReportedEvent(at_s=time_s - begin, step=step, kind=kind, label=label, text=_describe(record))
        events.append(event)
    return events


def _describe(record: Record) -> str:
    try:
        return describe(record)[0]
    except (KeyError, TypeError, ValueError):
        return json.dumps(record)


def _samples(path: Path, purpose: str) -> list[Record]:
    """Return the groups of evenly spaced steps, the first and the last step included, within MOST_SAMPLES."""
    by_step: dict[int, list[GroupPlace]] = {}
    for place in index(path):
        if place.purpose == purpose:
            by_step.setdefault(place.step, []).append(place)
    limit = MOST_STEPS
    while steps := evenly(sorted(by_step), limit):
        places: list[GroupPlace] = []
        for step in steps:
            places += by_step[step][: MOST_GROUPS[purpose]]
        groups = [_sample_of(group) for group in read_groups(path, places)]
        if len(json.dumps(groups)) <= MOST_SAMPLES or len(steps) == 1:
            return groups
        # Too long: try again with half the steps.
        limit = len(steps) // 2
    return []


def evenly(steps: list[int], limit: int) -> list[int]:
    """Return at most `limit` evenly spaced steps, the first and the last included."""
    if len(steps) <= limit:
        return steps
    if limit < 2:
        return steps[-1:]
    return [steps[round(place * (len(steps) - 1) / (limit - 1))] for place in range(limit)]


def _sample_of(group: Record) -> Record:
    """Return the fields of a group that the page shows: some of its rollouts, with shortened texts."""
    rollouts = group["rollouts"]
    left_out = len(rollouts) - MOST_ROLLOUTS
    return {
        "step": group["step"],
        "title": title_of(group),
        "prompt": _cut_text(str(group.get("prompt", ""))),
        "about": _cut_text(about(group)),
        "rollouts": [_rollout(rollout) for rollout in rollouts[:MOST_ROLLOUTS]],
        "more": max(0, left_out),
    }


def _rollout(rollout: Record) -> dict[str, Any]:
    """Return the fields of a rollout that the page shows. Its text is cut at MOST_LETTERS."""
    text = []
    room = MOST_LETTERS
    for piece, sampled in pieces(rollout):
        text.append([_cut_text(piece, room), sampled])
        room -= len(piece)
        if room <= 0:
            break
    head = "".join(part for part, _ in headline(rollout))
    return {"right": rollout.get("right"), "head": head, "facts": facts(rollout), "text": text}


def _cut_text(text: str, limit: int = MOST_LETTERS) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … {len(text) - limit:,} more letters"
