"""Plain lines of a run, for pipes and log files: an aligned line a step, a line an event. Pure."""

from collections.abc import Iterator

from rlctl.dashboard.event_text import describe
from rlctl.dashboard.formats import duration, error_factor, number
from rlctl.dashboard.state import SILENT
from rlctl.telemetry.jsonl import Record

HEADER_EVERY = 30
# (label, width, metric); a row fits 80 columns.
COLUMNS: dict[str, tuple[tuple[str, int, str], ...]] = {
    "grpo": (
        ("reward", 7, "reward/mean"),
        ("acc", 6, "reward/accuracy"),
        ("loss", 8, "loss/policy"),
        ("kl", 7, "loss/kl"),
        ("grad", 6, "train/grad_norm"),
        ("len", 6, "length/mean"),
        ("mismatch", 8, "mismatch/token_mult_prob_error"),
        ("tok/s/dev", 9, "throughput/effective"),
    ),
    "async": (
        ("reward", 6, "reward/mean"),
        ("acc", 5, "reward/accuracy"),
        ("loss", 8, "loss/policy"),
        ("grad", 6, "train/grad_norm"),
        ("age", 5, "age/mean"),
        ("idle t", 6, "idle/trainer"),
        ("idle g", 6, "idle/generator"),
        ("mismatch", 8, "mismatch/token_mult_prob_error"),
        ("tok/s/d", 7, "throughput/effective"),
    ),
    "sft": (
        ("loss", 9, "loss/nll"),
        ("grad", 7, "train/grad_norm"),
        ("lr", 8, "train/lr"),
        ("tokens", 8, "tokens/trained"),
        ("tok/s/dev", 10, "throughput/training"),
    ),
}


# First word of an event's line, where it is not its kind.
TAGS = {
    "run_started": "run",
    "processes": "process ids",
    "refit_opened": "refit",
    "engine_lost": "engine",
    "engine_restarted": "engine",
    "engine_gone": "engine",
}


class LineFormat:
    """Turns records into lines."""

    def __init__(self, every: int) -> None:
        """every: print only each so-many-th step, and the last one."""
        self._every = every
        # The step that a run ends with; None: not known yet.
        self._last: int | None = None
        self._printed = 0
        self._columns = COLUMNS["grpo"]

    def lines(self, record: Record) -> Iterator[str]:
        """Yield the lines of an event, a step or a validation."""
        kind = str(record.get("kind", ""))
        if kind == "validation":
            values = {key.partition("/")[2]: value for key, value in record.items() if key.startswith("validation/")}
            if not values.get("failed_rewards"):
                for name in ("failed_rewards", "answers"):
                    values.pop(name, None)
            shown = " ".join(f"{name} {number(value)}" for name, value in values.items())
            yield f"validation  step {record['step']}  {shown}"
        elif kind == "step":
            if int(record["step"]) % self._every == 0 or record["step"] == self._last:
                yield from self._step(record)
        elif kind == "checkpoint" and "path" not in record:
            # The record of its times. Its event says more.
            return
        elif kind == "startup" and record.get("seconds") is not None:
            yield f"startup     {record.get('what')} {duration(record['seconds'])}"
        elif kind and kind not in SILENT and kind not in ("validation_started", "run_ended"):
            if kind == "run_started":
                self._last = record.get("num_steps")
                self._columns = COLUMNS.get(str(record.get("algorithm")), COLUMNS["grpo"])
            tag = TAGS.get(kind, kind)
            text = describe(record)[0]
            yield f"{tag:<11} {text.removeprefix(f'{tag}: ').removeprefix(f'{tag} ')}"

    def _step(self, record: Record) -> Iterator[str]:
        if "age/max" in record:
            self._columns = COLUMNS["async"]
        if self._printed % HEADER_EVERY == 0:
            yield self._row("step", "time", [label for label, _, _ in self._columns])
        self._printed += 1
        took = duration(record["time/step"]) if "time/step" in record else "-"
        line = self._row(str(record["step"]), took, [_cell(name, record.get(name)) for _, _, name in self._columns])
        failed = int(record.get("reward/failed", 0))
        yield f"{line}  {failed} rewards failed" if failed else line

    def _row(self, step: str, took: str, cells: list[str]) -> str:
        columns = zip(cells, self._columns)
        return f"{step:>5} {took:>7}" + "".join(f" {cell:>{width}}" for cell, (_, width, _) in columns)


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.startswith("idle/"):
        return f"{value:.0%}"
    return error_factor(value) if name.startswith("mismatch/") else number(value)
