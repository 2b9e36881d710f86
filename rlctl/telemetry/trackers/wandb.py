"""Weights & Biases: a run there for each run directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from rlctl.telemetry.jsonl import Record
from rlctl.telemetry.trackers.text import COLUMNS, rows


class WandB:
    """One W&B run for each run directory; a resumed run continues it."""

    def __init__(self, run: Path, config: Mapping[str, Any], project: str) -> None:
        name = run.resolve().name
        self._run = wandb.init(
            project=project,
            name=name,
            id=name,
            dir=str(run),
            config=dict(config),
            resume="allow",
            # It would stand between rlctl and the terminal.
            settings=wandb.Settings(console="off"),
        )

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        # W&B refuses a step that it has seen, and validation has its step's number: the step is a field of its own.
        self._run.log({"step": step, **metrics})

    def samples(self, purpose: str, step: int, groups: Sequence[Record]) -> None:
        self._run.log({"step": step, f"rollouts/{purpose}": wandb.Table(list(COLUMNS), rows(step, groups))})

    def close(self) -> None:
        self._run.finish()
