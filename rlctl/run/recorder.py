"""The records of a loop in the run directory: steps, validations, rollouts, checkpoints.

Order at the end of a step: its record, then validation, then the checkpoint. So a kill cuts off only steps after the
newest checkpoint. A resume drops and repeats them.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlctl.config.schema import RunConfig
from rlctl.models.model_files import list_end_tokens
from rlctl.run.checkpoints import Checkpoint, Checkpoints
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.events import EventLog, MetricsLog
from rlctl.telemetry.exact_tokens import without_tokens
from rlctl.telemetry.jsonl import Record
from rlctl.telemetry.rollouts_file import GroupPurpose, RolloutsFile

# (the trainer's folder, that of the export if asked for, the export's dtype)
WriteTrainer = Callable[[Path, Path | None, str | None], None]
# (number of groups, from the first on; if with their exact tokens) -> their records
MakeRecords = Callable[[int, bool], list[Record]]


class RunRecorder:
    """Writer of one run's files."""

    def __init__(self, run_dir: RunDir, events: EventLog, metrics: MetricsLog, config: RunConfig) -> None:
        self.events = events
        telemetry = config.telemetry
        self.metrics = metrics
        self._rollouts = RolloutsFile(run_dir.rollouts, telemetry.rollouts_limit_mib << 20, events.emit)
        self._checkpoint, self._validation = config.checkpoint, config.validation
        self._shown = {"train": telemetry.groups_per_step, "validation": telemetry.groups_per_validation}
        self._record_tokens = telemetry.record_tokens
        self.checkpoints = Checkpoints(run_dir.checkpoints, config.checkpoint.keep_last, config.checkpoint.keep_best)
        # Metrics of the step just done: a checkpoint is ranked by metrics of the saved weights alone.
        self.measured: dict[str, float] = {}
        self.saved: int | None = None
        # The inputs that checkpoints depend on, see fingerprint.py.
        self.made_with: dict[str, Any] = {}
        # Dtype of exported Hugging Face folders, and the tokens at which their answers end.
        self.export_dtype: str | None = None
        self.end_tokens: tuple[int, ...] = ()

    def validation_due(self, step: int, last: bool) -> bool:
        """Return True every `validation.every` steps, after the last, and before the first if `validation.at_start`."""
        every = self._validation.every
        if step == 0:
            return every > 0 and self._validation.at_start
        return every > 0 and (last or step % every == 0)

    def checkpoint_due(self, step: int, last: bool) -> bool:
        """Return True every `checkpoint.every` steps, and after the last if `checkpoint.at_end`."""
        every = self._checkpoint.every
        return (last and self._checkpoint.at_end) or (every > 0 and step % every == 0)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the record of one step."""
        self.measured = dict(metrics)
        self.metrics.write("step", step, metrics)

    def outcomes(self, step: int, outcomes: Mapping[str, Any]) -> None:
        """Write the outcome of the step's tasks."""
        self._rollouts.outcomes(step, outcomes)

    def groups(self, step: int, purpose: GroupPurpose, records: MakeRecords) -> None:
        """Write some groups of a step or a validation, whole. Trackers get them without their exact tokens."""
        if count := self._shown[purpose]:
            shown = records(count, self._record_tokens)
            self._rollouts.groups(step, purpose, shown)
            self.metrics.samples(purpose, step, [without_tokens(each) for each in shown])

    @contextmanager
    def validation(self, step: int) -> Iterator[dict[str, float]]:
        """Write the record of one validation, which the block fills; its seconds are added."""
        self.events.emit("validation_started", step=step)
        begin, metrics = time.perf_counter(), dict[str, float]()
        yield metrics
        metrics["time/validation"] = time.perf_counter() - begin
        self.measured |= metrics
        self.metrics.write("validation", step, metrics)

    def save(
        self, step: int, state: dict[str, Any], write: WriteTrainer, write_own: Callable[[Path], None] | None = None
    ) -> Checkpoint:
        """Save a checkpoint: `write` fills the trainer's part, `write_own` the loop's."""
        begin = time.perf_counter()
        self.events.emit("phase", step=step, name="checkpoint")

        def both(folder: Path) -> None:
            (folder / "trainer").mkdir()
            if write_own:
                write_own(folder)
            write(folder / "trainer", folder / "hf" if self._checkpoint.export else None, self.export_dtype)
            if self._checkpoint.export and self.end_tokens:
                list_end_tokens(folder / "hf", self.end_tokens)

        checkpoint = self.checkpoints.save(step, {**state, "made_with": self.made_with, "score": self._score()}, both)
        self.saved = step
        seconds = time.perf_counter() - begin
        self.events.emit("checkpoint", step=step, path=str(checkpoint.path), seconds=seconds)
        return checkpoint

    @property
    def newest(self) -> str:
        """Name of the newest checkpoint, in words."""
        found = self.checkpoints.latest()
        return f"the last checkpoint is of step {found.step}" if found else "there is no checkpoint"

    def _score(self) -> float | None:
        name = self._checkpoint.metric
        value = self.measured.get(name.removeprefix("-"))
        return value if value is None or not name.startswith("-") else -value
