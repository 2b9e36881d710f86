"""Tracker TensorBoard: event files in the run directory."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rlctl.telemetry.jsonl import Record
from rlctl.telemetry.trackers.text import as_text

# TensorBoard renders text as Markdown: an indented block is shown as it is.
_VERBATIM = " " * 4
_STRING = 7  # DT_STRING


class TensorBoard:
    """Writer of event files for `tensorboard --logdir`. It needs the package tensorboard, and no torch."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        folder = run / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()])

    def samples(self, purpose: str, step: int, groups: Sequence[Record]) -> None:
        text = "\n".join(_VERBATIM + line for line in as_text(groups).split("\n"))
        tensor = TensorProto(dtype=_STRING, string_val=[text.encode()])
        tag = f"rollouts/{purpose}"
        self._add(step, [Summary.Value(tag=tag, metadata=create_summary_metadata(tag, ""), tensor=tensor)])

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, values: list[Summary.Value]) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()
