"""Records of a run as plain objects, read only from the run's directory (contract 7).

Each property reads the files again, so that a run can be followed while it trains.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any, overload

from rlctl.config.errors import did_you_mean
from rlctl.dashboard.state import Status, read_state
from rlctl.run.checkpoints import Checkpoints
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.exact_tokens import with_lists
from rlctl.telemetry.jsonl import Record, read_records
from rlctl.telemetry.metrics import installed_rows, read_rows
from rlctl.telemetry.rollouts_file import GroupPurpose, index, read_groups

# Fields of a record that are no metrics.
_NO_METRICS = ("kind", "time")


class MetricColumns(Sequence[Mapping[str, float]]):
    """Metrics of a run's steps, oldest first: a sequence of mappings from name to value, also readable as columns."""

    def __init__(self, records: Sequence[Record], metric_rows: Path) -> None:
        self._metric_rows = metric_rows
        self._records = [metrics_of(record) for record in records]

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, float]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, float]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, float] | list[Mapping[str, float]]:
        if isinstance(index, slice):
            return list(self._records[index])
        return self._records[index]

    @property
    def names(self) -> list[str]:
        """Names of all metrics, in the order in which they were first recorded. The first is `step`."""
        names: dict[str, None] = {}
        for record in self._records:
            names.update(dict.fromkeys(record))
        return list(names)

    def column(self, name: str) -> list[float]:
        """Return one value of a metric for each step; NaN if a step has none. Raises KeyError for an unknown name."""
        values = [record.get(name, nan) for record in self._records]
        if self._records and name not in self.names:
            raise KeyError(f"no metric {name}{did_you_mean(name, self.names)}")
        return values

    def to_dict(self) -> dict[str, list[float]]:
        """Return all columns by name, for example for a pandas DataFrame."""
        return {name: self.column(name) for name in self.names}

    def meaning(self, name: str) -> str:
        """Return the meaning of a metric in words; empty if it is not declared."""
        return (read_rows(self._metric_rows) or installed_rows()).meaning(name)

    def __repr__(self) -> str:
        return f"<metrics of {len(self)} steps, {len(self.names)} names>"


@dataclass(frozen=True)
class RecordedRollout:
    """One recorded attempt at a task."""

    index: int
    # (text, True if the policy sampled it) of each part after the prompt, in order.
    parts: list[tuple[str, bool]]
    # Number of sampled tokens.
    tokens: int
    # Reason why sampling ended, such as "stop" or "length".
    finish: str | None
    # Weighted sum of the rewards; None for a rollout that was left out.
    reward: float | None
    # Value of each reward, by the reward's name.
    rewards: dict[str, float]
    # True if the rollout is correct; None if no reward decides this.
    is_right: bool | None
    # Reason why the rollout was left out; None if it was not.
    failure: str | None
    # Mean advantage over the rollout's tokens; None if it was not trained.
    advantage: float | None
    # All fields of the record, for an episode with its messages and tools.
    record: Record = field(repr=False)

    @property
    def text(self) -> str:
        """All sampled text."""
        return "".join(text for text, is_sampled in self.parts if is_sampled)


@dataclass(frozen=True)
class RecordedGroup:
    """The recorded rollouts of one task at one step."""

    step: int
    purpose: GroupPurpose
    # Id of the task.
    task: str
    prompt: str
    # The row's reference answer; None for a row without one.
    answer: Any
    rollouts: list[RecordedRollout]
    # All fields of the record.
    record: Record = field(repr=False)

    def exact_tokens(self) -> list[dict[str, Any]]:
        """Return a dict with token ids, log-probs and weight versions as lists for each rollout.

        The result is empty if no tokens were recorded. Raises ValueError for a damaged record.
        """
        if "exact" not in self.record:
            return []
        return list(with_lists(self.record)["rollouts"])


@dataclass(frozen=True)
class RecordedCheckpoint:
    """A checkpoint of a run."""

    # Number of finished steps.
    step: int
    path: Path
    # Folder of the weights for transformers and vLLM; None if the checkpoint has none.
    weights: Path | None
    # Value of `checkpoint.metric`; larger is better. None if it was not measured.
    score: float | None


class RecordedRun:
    """A run, read from its directory. The run may be live, finished, or a copy."""

    def __init__(self, path: Path) -> None:
        self._run_dir = RunDir.open(path)

    def __repr__(self) -> str:
        return f"<run {self.name}: {self.status}, {len(self.metrics)} steps>"

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self._run_dir.path

    @property
    def name(self) -> str:
        """The run's name."""
        return self._run_dir.name

    @property
    def status(self) -> Status:
        """Status of the run: new, running, done, failed, interrupted, stopped or died."""
        return read_state(self.path).status

    @property
    def reason(self) -> str:
        """Reason why the run ended early; empty for a run that is done or still runs."""
        return str(read_state(self.path).end.get("reason") or "")

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config. Raises RunDirError if it is damaged."""
        return self._run_dir.recorded_config()

    @property
    def events(self) -> list[Record]:
        """All events, oldest first: startup, warnings, refits, checkpoints, the end."""
        return read_records(self._run_dir.events)

    @property
    def metrics(self) -> MetricColumns:
        """Metrics of the training steps."""
        return self._columns("step")

    @property
    def validations(self) -> MetricColumns:
        """Metrics of the validations."""
        return self._columns("validation")

    @property
    def checkpoints(self) -> list[RecordedCheckpoint]:
        """Existing checkpoints, oldest first."""
        checkpoints = Checkpoints(self._run_dir.checkpoints, keep_last=1, keep_best=0).all()
        return [
            RecordedCheckpoint(
                step=checkpoint.step,
                path=checkpoint.path,
                weights=checkpoint.export if checkpoint.export.is_dir() else None,
                score=checkpoint.state.get("score"),
            )
            for checkpoint in checkpoints
        ]

    def rollouts(self, purpose: GroupPurpose | None = None, step: int | None = None) -> Iterator[RecordedGroup]:
        """Yield recorded groups of rollouts, oldest first. One group is read at a time.

        A run records only a few groups in each step (`telemetry.groups_per_step`). purpose: "train" or "validation";
        None yields both. step: yield only the groups of this step.
        """
        places = [
            place
            for place in index(self._run_dir.rollouts)
            if purpose in (None, place.purpose) and step in (None, place.step)
        ]
        return map(_group_of, read_groups(self._run_dir.rollouts, places)) if places else iter(())

    def _columns(self, kind: str) -> MetricColumns:
        records = {}
        for record in read_records(self._run_dir.metrics):
            if record.get("kind") == kind and isinstance(record.get("step"), int):
                # The later record counts, because a resumed run repeats the steps after its checkpoint.
                records[record["step"]] = record
        return MetricColumns([records[step] for step in sorted(records)], self._run_dir.metric_rows)


def metrics_of(record: Record) -> dict[str, float]:
    """Return the numbers in a record of metrics.jsonl by name, `step` included."""
    return {name: value for name, value in record.items() if name not in _NO_METRICS and isinstance(value, int | float)}


def _group_of(record: Record) -> RecordedGroup:
    return RecordedGroup(
        step=record["step"],
        purpose=record["purpose"],
        task=record["task"],
        prompt=record["prompt"],
        answer=record.get("answer"),
        rollouts=[_rollout_of(rollout) for rollout in record["rollouts"]],
        record=record,
    )


def _rollout_of(record: Record) -> RecordedRollout:
    return RecordedRollout(
        index=record["index"],
        parts=[(text, is_sampled) for text, is_sampled in record["text"]],
        tokens=record["tokens"],
        finish=record.get("finish"),
        reward=record.get("reward"),
        rewards=record.get("rewards") or {},
        is_right=record.get("right"),
        failure=record.get("failed"),
        advantage=record.get("advantage"),
        record=record,
    )
