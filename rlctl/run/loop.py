"""Base class of the training loops: validation, checkpoints, health checks, and a checkpoint after Ctrl-C."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlctl.data.cursor import DrawOrder
from rlctl.run.checkpoints import Checkpoint, CheckpointError
from rlctl.run.health import SKIPPED_UPDATES, Health, HealthStop, StopBeforeUpdateError
from rlctl.run.recorder import RunRecorder, WriteTrainer
from rlctl.workers.errors import WorkerDied, WorkerTimeout

# Seconds that an unfinished checkpoint may take after an error of the run.
_PATIENCE_S = 60.0


class Loop(ABC):
    """Runs steps until `num_steps` are done, or until `stop()` returns True between two steps."""

    def __init__(
        self,
        num_steps: int,
        recorder: RunRecorder,
        cursor: DrawOrder,
        write: WriteTrainer,
        stop: Callable[[], bool],
        health: Health,
    ) -> None:
        self._num_steps = num_steps
        self._recorder = recorder
        self._cursor = cursor
        self._write = write
        self._stop = stop
        self._health = health
        # Name of a health check -> text added to its warning in the last step.
        self._details: dict[str, str] = {}
        # Number of steps done, which is the weight version.
        self.done = 0
        self._warned_of_skipped = set[str]()

    def run(self, start: int) -> None:
        """Run the steps after `start`. Validate and save as the config says; save also when the run is stopped.

        Returns when the last checkpoint is complete. Raises HealthStop after saving a checkpoint.
        """
        # Exclude the objects of imported modules from garbage collection. With 8,192 rollouts in flight a full
        # collection then takes 0.04 s of CPU instead of 0.18 s.
        gc.freeze()
        try:
            self._run_steps(start)
            self._recorder.finish_save()
        except Exception:
            self._recorder.leave_save(_PATIENCE_S)
            raise

    def _run_steps(self, start: int) -> None:
        """Run, validate, check and save as described in `run`."""
        self.done = start
        if start == 0 and not self._stop() and self._recorder.validation_due(0, last=False):
            self._validate(start)
            self._judge(start)
        while self.done < self._num_steps and not self._stop():
            self._details.clear()
            try:
                self.step()
            except (FloatingPointError, StopBeforeUpdateError) as error:
                raise self._save_before_stop(f"step {self.done + 1}: {error}", start) from error
            # Record an earlier checkpoint, if it has become complete, or raise its error.
            self._recorder.finish_save(wait=False)
            if self._recorder.validation_due(self.done, self._is_last()):
                self._validate(start)
            self._judge(start)
            if self._recorder.checkpoint_due(self.done, self._is_last()):
                self.save()
        # `stop` may have become true after `checkpoint_due` was asked.
        if start < self.done < self._num_steps and self._recorder.saved != self.done:
            self.save()

    def _validate(self, start: int) -> None:
        """Validate. Save and raise HealthStop if the run must stop."""
        try:
            self.validate()
        except StopBeforeUpdateError as error:
            raise self._save_before_stop(f"validation after step {self.done}: {error}", start) from error

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restore the loop's state from a checkpoint that `save_with` wrote."""
        self._health.load_state_dict(checkpoint.state.get("health", {}))

    def _count_skipped_updates(self, step: int, skipped: Sequence[str]) -> dict[str, float]:
        """Return the metric that counts a step's updates without an optimizer step; warn once about each cause.

        skipped: for each update of the step, the cause why it made no optimizer step; empty if it made one.
        """
        for cause in dict.fromkeys(skipped):
            if cause and cause not in self._warned_of_skipped:
                self._warned_of_skipped.add(cause)
                text = f"step {step}: no optimizer step, for {cause}; further ones are counted only"
                self._recorder.events.emit("warning", what=f"{text} ({SKIPPED_UPDATES.name})")
        return {SKIPPED_UPDATES.name: float(sum(map(bool, skipped)))}

    def _judge(self, start: int) -> None:
        """Warn about each bound that the last step has left. If a warning is fatal, save and raise HealthStop."""
        warnings = self._health.look(self.done, self._recorder.measured)
        fatal_texts = []
        for warning in warnings:
            detail = self._details.get(warning.check)
            text = f"step {warning.step}: {warning.text}{f': {detail}' if detail else ''}"
            fields = {
                "check": warning.check,
                "step": warning.step,
                "value": warning.value,
                "bound": warning.bound,
            }
            self._recorder.events.emit("warning", what=text, **fields)
            if warning.fatal:
                fatal_texts.append(text)
        if fatal_texts:
            raise self._save_before_stop(fatal_texts[0], start)

    def _save_before_stop(self, reason: str, start: int) -> HealthStop:
        """Save a checkpoint of the last complete step; return the error that ends an unhealthy run."""
        try:
            if start < self.done and self._recorder.saved != self.done:
                self.save()
            self._recorder.finish_save()
        except (CheckpointError, WorkerDied, WorkerTimeout) as error:
            return HealthStop(f"{reason}; {error}")
        return HealthStop(f"{reason}; {self._recorder.newest}")

    @abstractmethod
    def step(self) -> None:
        """Make one step, record it, and increase `done` by 1."""

    @abstractmethod
    def validate(self) -> None:
        """Measure the current weights on the held-out data."""

    @abstractmethod
    def close(self) -> None:
        """End the background threads of the loop."""

    def save(self) -> None:
        """Save a checkpoint of the last step."""
        self.save_with({})

    def save_with(self, more_state: dict[str, Any], write: Callable[[Path], None] | None = None) -> None:
        """Save a checkpoint of the last step.

        more_state: added to the checkpoint's state. write: writes further files into the checkpoint's folder.
        """
        state = {
            "version": self.done,
            "cursor": self._cursor.state_dict(),
            "health": self._health.state_dict(),
            **more_state,
        }
        self._recorder.save(self.done, state, self._write, write)

    def _is_last(self) -> bool:
        """Return True if no step follows the last one."""
        return self.done == self._num_steps or self._stop()
