"""Plain lines of a run, for pipes and log files: one aligned line for each step, one line for each event. Pure."""

from collections.abc import Iterator

from rlctl.dashboard.event_text import describe
from rlctl.dashboard.formats import duration, error_factor, number
from rlctl.dashboard.state import SILENT
from rlctl.grpo.losses.sections import KL_TO_REFERENCE, POLICY_LOSS, STEP_MISMATCH
from rlctl.grpo.metric_rows import ACCURACY, AGE, FAILED_REWARDS, GREATEST_AGE, LENGTH, REWARD
from rlctl.sft.metric_rows import NLL
from rlctl.telemetry.clock import STEP_SECONDS
from rlctl.telemetry.jsonl import Record
from rlctl.telemetry.throughput import EFFECTIVE, GENERATOR_IDLE, TRAINED_TOKENS, TRAINER_IDLE, TRAINING
from rlctl.training.metric_rows import GRAD_NORM, LEARNING_RATE

# Number of step lines between two headers.
HEADER_EVERY = 30
# (label, width, metric) of each column. A line has at most 80 characters.
COLUMNS: dict[str, tuple[tuple[str, int, str], ...]] = {
    "grpo": (
        ("reward", 7, REWARD.name),
        ("acc", 6, ACCURACY.name),
        ("loss", 8, POLICY_LOSS.name),
        ("kl", 7, KL_TO_REFERENCE.name),
        ("grad", 6, GRAD_NORM.name),
        ("len", 6, LENGTH.name),
        ("mismatch", 8, STEP_MISMATCH.name),
        ("tok/s/dev", 9, EFFECTIVE.name),
    ),
    "async": (
        ("reward", 6, REWARD.name),
        ("acc", 5, ACCURACY.name),
        ("loss", 8, POLICY_LOSS.name),
        ("grad", 6, GRAD_NORM.name),
        ("age", 5, AGE.name),
        ("idle t", 6, TRAINER_IDLE.name),
        ("idle g", 6, GENERATOR_IDLE.name),
        ("mismatch", 8, STEP_MISMATCH.name),
        ("tok/s/d", 7, EFFECTIVE.name),
    ),
    "sft": (
        ("loss", 9, NLL.name),
        ("grad", 7, GRAD_NORM.name),
        ("lr", 8, LEARNING_RATE.name),
        ("tokens", 8, TRAINED_TOKENS.name),
        ("tok/s/dev", 10, TRAINING.name),
    ),
}


# First word of an event's line, if it is not the event's kind.
TAGS = {
    "run_started": "run",
    "processes": "process ids",
    "refit_opened": "refit",
    "engine_lost": "engine",
    "engine_restarted": "engine",
    "engine_gone": "engine",
}


class LineFormat:
    """Formatter of a run's records as lines."""

    def __init__(self, every: int) -> None:
        """every: number of steps from one printed line to the next. The last step is printed too."""
        self._every = every
        # Last step of the run; None if it is not known yet.
        self._last_step: int | None = None
        # Number of step lines so far.
        self._printed = 0
        self._columns = COLUMNS["grpo"]

    def lines(self, record: Record) -> Iterator[str]:
        """Yield the lines of the record of an event, a step or a validation."""
        kind = str(record.get("kind", ""))
        if kind == "validation":
            metrics = {key.partition("/")[2]: metric for key, metric in record.items() if key.startswith("validation/")}
            # The number of answers is shown only together with failed rewards.
            if not metrics.get("failed_rewards"):
                for name in ("failed_rewards", "answers"):
                    metrics.pop(name, None)
            text = " ".join(f"{name} {number(metric)}" for name, metric in metrics.items())
            yield f"validation  step {record['step']}  {text}"
        elif kind == "step":
            if int(record["step"]) % self._every == 0 or record["step"] == self._last_step:
                yield from self._step_lines(record)
        elif kind == "checkpoint" and "path" not in record:
            # This record has only the times of a checkpoint. The event of the checkpoint is printed instead.
            return
        elif kind == "startup" and record.get("seconds") is not None:
            yield f"startup     {record.get('what')} {duration(record['seconds'])}"
        elif kind and kind not in SILENT and kind not in ("validation_started", "run_ended"):
            if kind == "run_started":
                self._last_step = record.get("num_steps")
                self._columns = COLUMNS.get(str(record.get("algorithm")), COLUMNS["grpo"])
            tag = TAGS.get(kind, kind)
            text = describe(record)[0]
            yield f"{tag:<11} {text.removeprefix(f'{tag}: ').removeprefix(f'{tag} ')}"

    def _step_lines(self, record: Record) -> Iterator[str]:
        """Yield a step's line, and before it the header if it is due."""
        if GREATEST_AGE.name in record:
            self._columns = COLUMNS["async"]
        if self._printed % HEADER_EVERY == 0:
            yield self._format_row("step", "time", [label for label, _, _ in self._columns])
        self._printed += 1
        took = duration(record[STEP_SECONDS.name]) if STEP_SECONDS.name in record else "-"
        line = self._format_row(
            str(record["step"]), took, [_cell(name, record.get(name)) for _, _, name in self._columns]
        )
        failed = int(record.get(FAILED_REWARDS.name, 0))
        yield f"{line}  {failed} rewards failed" if failed else line

    def _format_row(self, step: str, took: str, cells: list[str]) -> str:
        columns = zip(cells, self._columns)
        return f"{step:>5} {took:>7}" + "".join(f" {cell:>{width}}" for cell, (_, width, _) in columns)


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.startswith("idle/"):
        return f"{value:.0%}"
    return error_factor(value) if name.startswith("mismatch/") else number(value)
