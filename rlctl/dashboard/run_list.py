"""List of the runs in a folder, as a table or as plain values for scripts."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from rlctl.dashboard.console import figures, make_table, names, texts
from rlctl.dashboard.event_text import ENDS
from rlctl.dashboard.formats import count, number, percent, span
from rlctl.dashboard.state import RunState, best_checkpoint, read_state
from rlctl.grpo.metric_rows import ACCURACY, HELD_OUT_ACCURACY
from rlctl.telemetry.throughput import EFFECTIVE, TRAINING
from rlctl.utils.safe_text import neutral

STATUS_STYLE = {**ENDS, "running": "cyan", "died": "bold red", "new": "bright_black", "unreadable": "red"}
# Blanks between two columns.
_GAP = 2


@dataclass(frozen=True)
class RunEntry:
    """One run in the list."""

    name: str
    path: str
    kind: str
    status: str
    step: int
    num_steps: int
    # Accuracy of the last validation, or of the last step if the run does not validate; None if not measured.
    accuracy: float | None
    # Mean tokens/s/device: effective throughput if the run has a generator, else training throughput.
    throughput: float | None
    # Seconds since the run started.
    age_s: float
    # Damaged files of the run; empty if there are none.
    note: str = ""


def catalogue(root: Path) -> list[RunEntry]:
    """Return all runs in a folder, newest first. A subfolder without events.jsonl is no run."""
    folders = [path.parent for path in root.glob("*/events.jsonl")]
    return sorted(map(_read_entry, folders), key=lambda entry: entry.age_s)


def _read_entry(folder: Path) -> RunEntry:
    """Return the entry of a run. An error of reading becomes the entry's note, so that other runs are still listed."""
    try:
        return list_row(folder, read_state(folder))
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        return RunEntry(
            name=neutral(folder.name),
            path=str(folder),
            kind="",
            status="unreadable",
            step=0,
            num_steps=0,
            accuracy=None,
            throughput=None,
            age_s=_age_s(folder),
            note=f"cannot be read: {reason}",
        )


def _age_s(folder: Path, started: float | None = None) -> float:
    with suppress(OSError):
        return max(0.0, time.time() - (folder.stat().st_mtime if started is None else started))
    return 0.0


def newest(root: Path) -> Path | None:
    """Return the directory of the run that started last; None if there is no run."""
    entries = catalogue(root)
    return Path(entries[0].path) if entries else None


def table(entries: list[RunEntry], width: int) -> Table:
    """Return a table with one row for each run. Columns are left out until it fits into `width` characters.

    entries: at least one.
    """
    rows = [
        {
            "name": Text(entry.name),
            "kind": Text(entry.kind),
            "status": Text(entry.status, style=STATUS_STYLE.get(entry.status, "default")),
            "step": Text(f"{entry.step}/{entry.num_steps}"),
            "accuracy": Text(percent(entry.accuracy)),
            "tok/s/device": Text(number(entry.throughput)),
            "started": Text(f"{span(entry.age_s)} ago"),
        }
        for entry in entries
    ]
    widths = {}
    for title in rows[0]:
        longest_text = max(len(row[title]) for row in rows)
        widths[title] = max(len(title), longest_text) + _GAP
    for least_needed in ("tok/s/device", "kind", "started", "accuracy"):
        if sum(widths.values()) > width:
            del widths[least_needed]
    # Only the name's column may be narrower than its texts, which then wrap.
    columns = []
    for title, column_width in widths.items():
        if title == "name":
            columns.append(texts(title))
        elif title in ("kind", "status"):
            columns.append(Column(title, justify="left", min_width=column_width - _GAP))
        else:
            columns.append(Column(title, justify="right", min_width=column_width - _GAP))
    shown_rows = ([row[title] for title in widths] for row in rows)
    return make_table(*columns, rows=shown_rows, titles="bright_black", gap=_GAP)


def as_dict(state: RunState) -> dict[str, Any]:
    """Return a run as plain values for scripts: its kind, progress, newest records and best checkpoint."""
    best = best_checkpoint(state)
    return {
        "name": state.name,
        "kind": state.algorithm,
        "status": state.status,
        "reason": state.end.get("reason") or "",
        "step": state.step,
        "num_steps": state.num_steps,
        "elapsed_s": state.elapsed_s,
        "last": state.last,
        "validation": state.validations.last,
        "best_checkpoint": None if best is None else {**state.checkpoints[best[0]], "value": best[1]},
        "next": state.end.get("next") or [],
    }


def metrics_table(state: RunState) -> Table:
    """Return a table of every metric of the last step and the last validation, with its value and meaning."""
    records = {**state.last, **state.validations.last}
    metrics = sorted(name for name in records if "/" in name)
    return make_table(
        names("metric of the last step", ""),
        figures("value"),
        Column("meaning", style="bright_black"),
        rows=((name, number(records[name]), state.declared.meaning(name)) for name in metrics),
        titles="bright_black",
    )


def list_row(folder: Path, state: RunState) -> RunEntry:
    """Return the list's entry for the run in `folder`, from its state."""
    # From the last record: a validation without scores must not show an earlier validation's accuracy.
    accuracy = state.validations.last.get(HELD_OUT_ACCURACY.name)
    rate = state.mean(EFFECTIVE.name)
    damaged = [f"{file}: {count(lines, 'damaged line')} left out" for file, lines in state.damaged.items() if lines]
    return RunEntry(
        name=state.name,
        path=str(folder),
        kind=str(state.start.get("algorithm", "")),
        status=state.status,
        step=state.step,
        num_steps=state.num_steps,
        accuracy=accuracy if state.validations.last else state.latest(ACCURACY.name),
        throughput=rate if rate is not None else state.mean(TRAINING.name),
        age_s=_age_s(folder, state.start.get("time")),
        note="; ".join(damaged),
    )
