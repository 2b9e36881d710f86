"""Writes the records of a loop to the run directory: steps, validations, rollouts, checkpoints.

At the end of a step its record is written, then that of the validation, then the checkpoint. The checkpoint may be
written while further steps train. So a kill loses only steps after the newest complete checkpoint. A resume drops the
records of these steps and repeats them.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlctl.config.schema import RunConfig
from rlctl.models.model_files import list_end_tokens
from rlctl.run.checkpoints import Checkpoint, Checkpoints, CheckpointSave, Known, Write
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.clock import CHECKPOINT_SECONDS, VALIDATION_SECONDS
from rlctl.telemetry.events import EventLog, MetricsLog
from rlctl.telemetry.exact_tokens import without_tokens
from rlctl.telemetry.jsonl import Record
from rlctl.telemetry.metrics import Metric, MetricTable, installed_rows, write_rows
from rlctl.telemetry.rollouts_file import GroupPurpose, RolloutsFile


class BegunSave(Protocol):
    """The trainer's part of a checkpoint that is being written."""

    @property
    def wait_cause(self) -> str:
        """Reason why steps must wait until this part is written; empty if they may train meanwhile."""

    def finish(self) -> Known:
        """Wait until all files are synced to disk; return their sizes and digests."""


# Begins to write the trainer's part. Arguments: the trainer's folder; the export's folder or None; the export's dtype;
# True if steps may train meanwhile.
WriteTrainer = Callable[[Path, Path | None, str | None, bool], BegunSave]
# Returns the records of the first groups. Arguments: number of groups; True to include their exact tokens.
MakeRecords = Callable[[int, bool], list[Record]]


@dataclass
class _Saving:
    """A checkpoint that a thread is writing."""

    step: int
    begin: float
    save: CheckpointSave
    done: threading.Event = field(default_factory=threading.Event)
    # Seconds from begin to end.
    seconds: float = 0.0
    # Seconds in which training waited; None if it waited all the time.
    stopped: float | None = None
    checkpoint: Checkpoint | None = None
    error: BaseException | None = None

    def run(self, events: EventLog) -> None:
        """Finish the save and emit the event `checkpoint`. Set the field `checkpoint`, or `error` if saving fails."""
        try:
            checkpoint = self.save.finish()
            self.seconds = time.perf_counter() - self.begin
            times = {"seconds": self.seconds, "stopped": self.stopped or self.seconds}
            events.emit("checkpoint", step=self.step, path=str(checkpoint.path), **times)
            self.checkpoint = checkpoint
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


class RunRecorder:
    """Writes the records and checkpoints of one run."""

    def __init__(self, run_dir: RunDir, events: EventLog, metrics: MetricsLog, config: RunConfig) -> None:
        self.events = events
        self._metric_rows = run_dir.metric_rows
        self._declared = installed_rows()
        # Names of metrics that were looked up in `_declared` already.
        self._looked_up = set[str]()
        # Subjects of `warn_once`.
        self._warned_subjects = set[str]()
        telemetry = config.telemetry
        self.metrics = metrics
        self._rollouts = RolloutsFile(run_dir.rollouts, telemetry.rollouts_limit_mib << 20, events.emit)
        self._checkpoint = config.checkpoint
        self._validation = config.validation
        # Purpose -> number of groups to record.
        self._group_counts = {"train": telemetry.groups_per_step, "validation": telemetry.groups_per_validation}
        self._record_tokens = telemetry.record_tokens
        self.checkpoints = Checkpoints(run_dir.checkpoints, config.checkpoint.keep_last, config.checkpoint.keep_best)
        # Metrics of the last step and its validation. They measure the weights of the step's checkpoint, so only they
        # rank it.
        self.measured: dict[str, float] = {}
        # Step of the last checkpoint that was begun and has not failed.
        self.saved: int | None = None
        self._saving: _Saving | None = None
        self._warned_of_copies = False
        # Fingerprint of the run's inputs, see fingerprint.py.
        self.made_with: dict[str, Any] = {}
        # dtype of exported Hugging Face folders, and the tokens that end an answer there.
        self.export_dtype: str | None = None
        self.end_tokens: tuple[int, ...] = ()

    def validation_due(self, step: int, last: bool) -> bool:
        """Return True if a validation is due after `step`: every `validation.every` steps, after the last step, and
        before the first one (step 0) if `validation.at_start`."""
        every = self._validation.every
        if step == 0:
            return every > 0 and self._validation.at_start
        return every > 0 and (last or step % every == 0)

    def checkpoint_due(self, step: int, last: bool) -> bool:
        """Return True if a checkpoint is due after `step`: every `checkpoint.every` steps, and after the last step if
        `checkpoint.at_end`."""
        every = self._checkpoint.every
        return (last and self._checkpoint.at_end) or (every > 0 and step % every == 0)

    def declare(self, rows: Iterable[Metric]) -> None:
        """Add metrics that a user's environment, reward or loss declares, and rewrite the run's file of metric rows."""
        self._declared = MetricTable([*self._declared.rows, *rows])
        write_rows(self._metric_rows, self._declared.rows)

    def warn_once(self, subject: str, warning: str | None) -> None:
        """Emit the first warning about `subject`; later ones, and None, are dropped."""
        if warning and subject not in self._warned_subjects:
            self._warned_subjects.add(subject)
            self.events.emit("warning", what=warning)

    def _tell_undeclared(self, metrics: Mapping[str, float]) -> None:
        """Warn once about each metric that is not declared."""
        for name in metrics.keys() - self._looked_up:
            self._looked_up.add(name)
            if self._declared.find(name) is None:
                text = "is recorded, and shown without a meaning; declare it in the attribute `metrics` of your class"
                self.events.emit("warning", what=f"metric {name} is not declared: it {text}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the record of one step."""
        self.measured = dict(metrics)
        self._tell_undeclared(metrics)
        self.metrics.write("step", step, metrics)

    def outcomes(self, step: int, outcomes: Mapping[str, Any]) -> None:
        """Write the outcome of the step's tasks."""
        self._rollouts.outcomes(step, outcomes)

    def groups(self, step: int, purpose: GroupPurpose, records: MakeRecords) -> None:
        """Write some groups of a step or a validation to the rollouts file. Trackers get them without exact tokens."""
        if count := self._group_counts[purpose]:
            groups = records(count, self._record_tokens)
            self._rollouts.groups(step, purpose, groups)
            self.metrics.samples(purpose, step, [without_tokens(group) for group in groups])

    @contextmanager
    def validation(self, step: int) -> Iterator[dict[str, float]]:
        """Yield a dict for the block to fill with a validation's metrics; add its seconds, and write the record."""
        self.events.emit("validation_started", step=step)
        begin = time.perf_counter()
        metrics: dict[str, float] = {}
        yield metrics
        metrics[VALIDATION_SECONDS.name] = time.perf_counter() - begin
        self.measured |= metrics
        self._tell_undeclared(metrics)
        self.metrics.write("validation", step, metrics)

    def save(
        self,
        step: int,
        state: dict[str, Any],
        begin_trainer: WriteTrainer,
        write_own: Callable[[Path], None] | None = None,
    ) -> None:
        """Save a checkpoint, after waiting for the previous save.

        begin_trainer: begins to write the trainer's part. write_own: writes the loop's part. With
        `checkpoint.beside_training` this returns as soon as the trainer's state is copied, so that training continues.
        `finish_save` returns the finished checkpoint.
        """
        self.finish_save()
        begin = time.perf_counter()
        self.events.emit("phase", step=step, name="checkpoint")
        wait_cause = ""

        def begin_files(folder: Path) -> Write:
            nonlocal wait_cause
            export = folder / "hf" if self._checkpoint.export else None
            (folder / "trainer").mkdir()
            trainer_save = begin_trainer(
                folder / "trainer", export, self.export_dtype, self._checkpoint.beside_training
            )
            wait_cause = trainer_save.wait_cause

            def finish_files() -> Known:
                if write_own:
                    write_own(folder)
                synced_files = trainer_save.finish()
                if export and self.end_tokens:
                    list_end_tokens(export, self.end_tokens)
                return synced_files

            return finish_files

        state = {**state, "made_with": self.made_with, "score": self._score()}
        saving = _Saving(step, begin, self.checkpoints.begin(step, state, begin_files))
        if wait_cause and not self._warned_of_copies:
            self._warned_of_copies = True
            self.events.emit("warning", what=f"steps wait while checkpoints are written: {wait_cause}")
        threading.Thread(target=saving.run, args=(self.events,), name="checkpoint", daemon=True).start()
        self._saving = saving
        self.saved = step
        if self._checkpoint.beside_training and not wait_cause:
            saving.stopped = time.perf_counter() - begin
        else:
            self.finish_save()

    def finish_save(self, *, wait: bool = True) -> Checkpoint | None:
        """Wait for the save in progress, and return its checkpoint; None if no save is in progress.

        wait: if False, do not wait, and return None if the save has not ended. Raises the save's error once, see
        `CheckpointSave.finish`.
        """
        saving = self._saving
        if saving is None or not (wait or saving.done.is_set()):
            return None
        saving.done.wait()
        self._saving = None
        if saving.checkpoint is None:
            self.saved = None
            assert saving.error
            raise saving.error
        times = {CHECKPOINT_SECONDS.name: saving.seconds, "time/checkpoint_stopped": saving.stopped or saving.seconds}
        self.metrics.write("checkpoint", saving.step, times)
        return saving.checkpoint

    def leave_save(self, wait_s: float) -> None:
        """Wait at most `wait_s` seconds for the save in progress, after an error of the run. If the save fails, only
        warn, so that the caller can raise the run's error."""
        saving = self._saving
        self._saving = None
        if saving is None:
            return
        if not saving.done.wait(wait_s):
            saving.save.abandon()
            self.events.emit("warning", what=f"the checkpoint of step {saving.step} was not finished")
        elif saving.error:
            self.events.emit("warning", what=str(saving.error))

    @property
    def newest(self) -> str:
        """Text with the step of the newest checkpoint, for messages."""
        checkpoint = self.checkpoints.latest()
        return f"the last checkpoint is of step {checkpoint.step}" if checkpoint else "there is no checkpoint"

    def _score(self) -> float | None:
        """Return the value by which the checkpoint is ranked, larger is better; None if it was not measured."""
        name = self._checkpoint.metric
        value = self.measured.get(name.removeprefix("-"))
        # A leading - in `checkpoint.metric` means that smaller values are better.
        return value if value is None or not name.startswith("-") else -value
