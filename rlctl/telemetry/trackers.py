"""TensorBoard and Weights & Biases, both optional: they get the numbers of metrics.jsonl and may fail freely.

Whatever goes wrong in one, at import, start or any write, is one warning event, and that tracker is done.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlctl.telemetry.events import EventLog, Tracker


def open_trackers(
    run: Path, events: EventLog, config: Mapping[str, Any], tensorboard: bool, wandb_project: str | None
) -> list[Tracker]:
    """Return the trackers asked for. run: the run directory. config: the resolved one as plain containers, for W&B."""
    makers: dict[str, Callable[[], Tracker]] = {}
    if tensorboard:
        makers["tensorboard"] = lambda: TensorBoard(run / "tensorboard")
    if wandb_project is not None:
        project = wandb_project
        makers["wandb"] = lambda: WandB(project, run, config)
    return [Guarded(name, make, events) for name, make in makers.items()]


class Guarded:
    """A tracker that cannot hurt: made now, dropped with one warning at its first failure."""

    def __init__(self, name: str, make: Callable[[], Tracker], events: EventLog) -> None:
        self._name = name
        self._events = events
        self._tracker: Tracker | None = None
        self._try(lambda: setattr(self, "_tracker", make()))

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        if (tracker := self._tracker) is not None:
            self._try(lambda: tracker.write(kind, step, metrics))

    def close(self) -> None:
        if (tracker := self._tracker) is not None:
            self._try(tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._tracker = None
            hint = f"; pip install 'rlctl[{self._name}]'" if isinstance(error, ImportError) else ""
            what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self._events.emit("warning", what=f"{self._name} is off from now on: {what}{hint}")


class TensorBoard:
    """Event files under `folder`, for `tensorboard --logdir`. Written by tensorboard alone, no torch."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        import time

        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """One W&B run a run directory; a resumed run continues it."""

    def __init__(self, project: str, run: Path, config: Mapping[str, Any]) -> None:
        import wandb

        name = run.resolve().name
        self._run = wandb.init(project=project, name=name, id=name, dir=str(run), config=dict(config), resume="allow")

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        # Validation falls on a step that may be logged already, so the step is a field of its own.
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()
