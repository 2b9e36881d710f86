"""What every loop does around its steps: validates and saves when due, judges the run's health, and leaves a checkpoint
at Ctrl-C."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlctl.data.cursor import Cursor
from rlctl.run.checkpoints import Checkpoint, CheckpointError
from rlctl.run.health import Health, HealthStop
from rlctl.run.recorder import RunRecorder, WriteTrainer
from rlctl.workers.errors import WorkerDied, WorkerTimeout


class Loop(ABC):
    """Runs steps until `num_steps`, or until `stop()` is true between two steps. `done`: steps done, the version."""

    def __init__(
        self,
        num_steps: int,
        recorder: RunRecorder,
        cursor: Cursor,
        write: WriteTrainer,
        stop: Callable[[], bool],
        health: Health,
    ) -> None:
        self._num_steps, self._recorder, self._cursor, self._write, self._stop = (
            num_steps,
            recorder,
            cursor,
            write,
            stop,
        )
        self._health = health
        # Of the step just done: a check's name -> what its warning says besides.
        self._details: dict[str, str] = {}
        self.done = 0

    def run(self, start: int) -> None:
        """From the step after `start` on. Validates and saves as the config says, and saves when it is stopped.

        Raises HealthStop, with a checkpoint saved.
        """
        self.done = start
        if start == 0 and not self._stop() and self._recorder.validation_due(0, last=False):
            self.validate()
            self._judge(start)
        while self.done < self._num_steps and not self._stop():
            self._details.clear()
            try:
                self.step()
            except FloatingPointError as error:
                raise self._stopped(f"step {self.done + 1}: {error}", start) from error
            if self._recorder.validation_due(self.done, self._last()):
                self.validate()
            self._judge(start)
            if self._recorder.checkpoint_due(self.done, self._last()):
                self.save()
        # A stop may have come after the checkpoint was found not to be due.
        if start < self.done < self._num_steps and self._recorder.saved != self.done:
            self.save()

    def resume(self, checkpoint: Checkpoint) -> None:
        """Take up what `save_with` kept."""
        self._health.load_state_dict(checkpoint.state.get("health", {}))

    def _judge(self, start: int) -> None:
        """Say what of the step just done is outside its bound. Raises HealthStop, with a checkpoint of the step."""
        warnings = self._health.look(self.done, self._recorder.measured)
        said = []
        for each in warnings:
            detail = self._details.get(each.check)
            said.append(f"step {each.step}: {each.what}{f': {detail}' if detail else ''}")
            fields = {"check": each.check, "step": each.step, "value": each.value, "bound": each.bound}
            self._recorder.events.emit("warning", what=said[-1], **fields)
        if fatal := [what for what, each in zip(said, warnings) if each.fatal]:
            raise self._stopped(fatal[0], start)

    def _stopped(self, why: str, start: int) -> HealthStop:
        """The end of a run for its health's sake, once there is a checkpoint of the last whole step."""
        try:
            if start < self.done and self._recorder.saved != self.done:
                self.save()
        except (CheckpointError, WorkerDied, WorkerTimeout) as error:
            return HealthStop(f"{why}; {error}")
        return HealthStop(f"{why}; {self._recorder.newest}")

    @abstractmethod
    def step(self) -> None:
        """One step, recorded; `done` is one more afterwards."""

    @abstractmethod
    def validate(self) -> None:
        """The held-out data, under the weights as they are."""

    @abstractmethod
    def close(self) -> None:
        """End what works beside the steps."""

    def save(self) -> None:
        """A checkpoint of the step just done."""
        self.save_with({})

    def save_with(self, own: dict[str, Any], write: Callable[[Path], None] | None = None) -> None:
        """With more state, and what `write` puts into the checkpoint's folder."""
        state = {"version": self.done, "cursor": self._cursor.state_dict(), "health": self._health.state_dict(), **own}
        self._recorder.save(self.done, state, self._write, write)

    def _last(self) -> bool:
        return self.done == self._num_steps or self._stop()
