"""Writer and readers of rollouts.jsonl: the outcome of each step's tasks, and whole groups of rollouts.

The file has two kinds of lines. Each line begins with its kind and its step:

- prompts: one line a step: the ids of its tasks by final state (trained, filtered, dropped). These lines are never
  removed.
- group: step, purpose (train or validation), task, prompt, answer, outcome (a state and its reason), rollouts. Each
  rollout has index, text (the text after the prompt as pairs: a piece of text, and true if the policy sampled it),
  tokens (number of sampled ones), finish, reward, rewards by name, right, failed (reason), advantage (mean over its
  tokens; null if it was not trained), advantages (smallest and largest, where they differ), versions (weight version
  -> number of tokens it sampled), and with an environment episode (messages, ending, turns, its value, tools,
  failures). With `telemetry.record_tokens` the group's last field, exact, has the token ids of all rollouts with
  log-probs and versions (`exact_tokens.py`).
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlctl.telemetry.jsonl import JsonlWriter, Record
from rlctl.utils.files import sync

GroupPurpose = Literal["train", "validation"]
_HEAD = re.compile(rb'\{"kind": "group", "step": (\d+), "purpose": "(train|validation)", "task": ("(?:[^"\\]|\\.)*")')
# `newest_group` reads the last 64 KiB first, because the live view calls it after every step. It reads at most the
# last 16 MiB.
_NEWEST_BYTES = 16 << 20
_FIRST_BYTES = 64 << 10


class RolloutsFile:
    """Writer of rollouts.jsonl. The lines of groups take at most `max_bytes` together.

    If they take more, the groups of every second recorded step are removed. This repeats as the run goes on, so older
    steps become sparser than newer ones. The first removal in a process emits a warning.
    """

    def __init__(self, path: Path, max_bytes: int, emit: Callable[..., None]) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._emit = emit
        self._writer = JsonlWriter(path)
        # Bytes of the groups in the file. Counted at the first write, because a resume may truncate the file before.
        self._bytes: int | None = None
        self._warned = False

    def outcomes(self, step: int, outcomes: Mapping[str, Any]) -> None:
        """Write the outcome of a step's tasks."""
        self._writer.write({"kind": "prompts", "step": step, **outcomes})

    def groups(self, step: int, purpose: GroupPurpose, records: Sequence[Record]) -> None:
        """Write groups of rollouts. Each record has at least task, prompt and rollouts."""
        if self._bytes is None:
            self._bytes = sum(place.length for place in _places(self._path))
        before = self._size()
        for record in records:
            head = {"kind": "group", "step": step, "purpose": purpose, "task": record["task"]}
            self._writer.write({**head, **record})
        self._bytes += self._size() - before
        if self._bytes > self._max_bytes:
            self._thin_out()

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def _thin_out(self) -> None:
        """Remove the groups of every second step from the file, until the rest fits into `max_bytes`."""
        places = _places(self._path)
        # Bytes of each step's groups.
        sizes = Counter[int]()
        for place in places:
            sizes[place.step] += place.length
        steps = sorted(sizes)
        while sum(sizes[step] for step in steps) > self._max_bytes:
            if len(steps) > 2:
                # Keep the first step, and every second one of the others, counted from the newest.
                newest_first = steps[:0:-2]
                steps = [steps[0], *reversed(newest_first)]
            else:
                steps = steps[1:]
        remaining_steps = set(steps)
        try:
            _rewrite(self._path, {place.offset for place in places if place.step not in remaining_steps})
        except OSError:  # for example a full disk: the next write tries again
            return
        self._bytes = sum(sizes[step] for step in steps)
        if not self._warned:
            self._warned = True
            excess = f"{self._path.name}: groups took more than {self._max_bytes / 2**20:g} MiB"
            remedy = "those of every second step are left out, now and each time it happens again"
            self._emit("warning", what=f"{excess} (telemetry.rollouts_limit_mib): {remedy}")


@dataclass(frozen=True)
class GroupPlace:
    """Position of a group's line in the file."""

    step: int
    purpose: str
    task: str
    # Byte at which the line begins, and number of bytes of the line.
    offset: int
    length: int


def index(path: Path) -> list[GroupPlace]:
    """Return the position of each complete group, in file order; an empty list if there is no file.

    A resume repeats steps. If a task has several groups of one step, only the last one is returned, so that each
    rollout counts once. Only the beginning of each line is parsed.
    """
    places = _places(path)
    newest = {(place.purpose, place.step, place.task): place.offset for place in places}
    return [place for place in places if newest[place.purpose, place.step, place.task] == place.offset]


def _places(path: Path) -> list[GroupPlace]:
    """Return the position of each complete group, also if a repeated step has a newer group of the same task."""
    places = []
    offset = 0
    try:
        with path.open("rb") as file:
            for line in file:
                if (head := _HEAD.match(line)) and line.endswith(b"\n"):
                    with suppress(ValueError):  # the task is not a JSON string, or the step has thousands of digits
                        task = json.loads(head[3])
                        places.append(
                            GroupPlace(
                                step=int(head[1]),
                                purpose=head[2].decode(),
                                task=task,
                                offset=offset,
                                length=len(line),
                            )
                        )
                offset += len(line)
    except FileNotFoundError:
        pass
    return places


def read_groups(path: Path, places: Sequence[GroupPlace]) -> Iterator[Record]:
    """Yield the groups at these positions. Skip a position where the file no longer has a group."""
    with path.open("rb") as file:
        for place in places:
            file.seek(place.offset)
            if group := _parse_group(file.read(place.length)):
                yield group


def newest_group(path: Path) -> Record | None:
    """Return the group that was written last; None if the last 16 MiB of the file have no complete group."""
    count = _FIRST_BYTES
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            while True:
                file.seek(max(0, size - count))
                # The first line may be cut at its begin; then it does not match. The last one is unfinished, or empty.
                lines = file.read(count).split(b"\n")[:-1]
                for line in reversed(lines):
                    if _HEAD.match(line) and (group := _parse_group(line)):
                        return group
                if count >= min(size, _NEWEST_BYTES):
                    return None
                count *= 4
    except OSError:
        return None


def _parse_group(line: bytes) -> Record | None:
    """Return the group in a line of the file; None if the line is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("kind") != "group":
        return None
    rollouts = record.get("rollouts")
    is_sound = isinstance(rollouts, list) and all(isinstance(rollout, dict) for rollout in rollouts)
    return record if is_sound else None


def _rewrite(path: Path, left_out: set[int]) -> None:
    """Remove the lines that begin at the offsets `left_out`. The file is replaced atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    with path.open("rb") as old, temporary.open("wb") as new:
        offset = 0
        for line in old:
            if offset not in left_out:
                new.write(line)
            offset += len(line)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)
