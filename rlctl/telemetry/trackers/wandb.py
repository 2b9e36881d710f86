"""Weights & Biases: a run there for each run directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import wandb

from rlctl.telemetry.jsonl import Record
from rlctl.telemetry.trackers.text import COLUMNS, rows


class WandB:
    """One W&B run for each run directory; a resumed run continues it. Charts have the training step as their axis."""

    def __init__(
        self,
        run: Path,
        config: Mapping[str, Any],
        project: str,
        entity: str | None,
        group: str | None,
        tags: Sequence[str],
        mode: Literal["online", "offline", "disabled"] | None,
        id: str | None,
    ) -> None:
        name = run.resolve().name
        self._run = wandb.init(
            project=project,
            entity=entity,
            group=group,
            tags=list(tags) or None,
            mode=mode,
            name=name,
            id=id or name,
            dir=str(run),
            config=dict(config),
            resume="allow",
            # It would stand between rlctl and the terminal.
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        # W&B refuses a step that it has seen, and validation has its step's number: the step is a separate field.
        self._run.log({"step": step, **metrics})

    def samples(self, purpose: str, step: int, groups: Sequence[Record]) -> None:
        self._run.log({"step": step, f"rollouts/{purpose}": wandb.Table(list(COLUMNS), rows(step, groups))})

    def close(self) -> None:
        self._run.finish()
