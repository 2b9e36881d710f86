"""Tracker Weights & Biases: one W&B run for each run directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import wandb

from rlctl.telemetry.jsonl import Record
from rlctl.telemetry.trackers.text import COLUMNS, rows


class WandB:
    """One W&B run for each run directory; a resumed run continues it. The x axis of charts is the training step."""

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
            # No capture of the console: W&B would wrap the terminal that rlctl draws on.
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        # The step is a field of the record, because W&B refuses the same step twice, and a validation repeats the
        # number of its step.
        self._run.log({"step": step, **metrics})

    def samples(self, purpose: str, step: int, groups: Sequence[Record]) -> None:
        self._run.log({"step": step, f"rollouts/{purpose}": wandb.Table(list(COLUMNS), rows(step, groups))})

    def close(self) -> None:
        self._run.finish()
