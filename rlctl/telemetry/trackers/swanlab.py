"""Tracker SwanLab: a run on its server, or files in the run directory that a user uploads later."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import swanlab

from rlctl.telemetry.jsonl import Record
from rlctl.telemetry.trackers.text import as_text


class SwanLab:
    """One SwanLab run for each run directory; a resumed run continues it."""

    def __init__(self, run: Path, config: Mapping[str, Any], project: str, mode: str) -> None:
        run = run.resolve()
        self._run = swanlab.init(
            project=project,
            name=run.name,
            # SwanLab allows letters and digits alone.
            id=hashlib.sha256(str(run).encode()).hexdigest()[:16],
            log_dir=str(run / "swanlab"),
            mode=mode,
            config=dict(config),
            resume="allow",
            # No terminal proxy: it would upload printed text, and wrap the terminal that rlctl draws on.
            settings=swanlab.Settings(terminal={"proxy_type": "none"}),
        )

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, purpose: str, step: int, groups: Sequence[Record]) -> None:
        texts = [swanlab.Text(as_text([group]), caption=str(group["task"])) for group in groups]
        self._run.log({f"rollouts/{purpose}": texts}, step=step)

    def close(self) -> None:
        self._run.finish()
