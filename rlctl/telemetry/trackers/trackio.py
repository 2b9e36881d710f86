"""Tracker Trackio: a run in its local database, or in a Hugging Face Space."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trackio

from rlctl.telemetry.jsonl import Record
from rlctl.telemetry.trackers.text import as_text


class Trackio:
    """One Trackio run for each run directory; a resumed run continues it.

    The environment variable TRACKIO_DIR names the folder of the local database.
    """

    def __init__(self, run: Path, config: Mapping[str, Any], project: str, space: str | None) -> None:
        # Trackio's monitors of CPU and GPU are off: rlctl measures both itself, and each monitor is a thread more.
        self._run = trackio.init(
            project=project,
            name=run.resolve().name,
            config=dict(config),
            space_id=space,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, purpose: str, step: int, groups: Sequence[Record]) -> None:
        self._run.log({f"rollouts/{purpose}": trackio.Markdown(f"```text\n{as_text(groups)}\n```")}, step=step)

    def close(self) -> None:
        self._run.finish()
