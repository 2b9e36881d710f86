"""The plain view: one aligned line a step for pipes and log files, from the same files as the dashboard."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TextIO

from rlctl.dashboard.event_text import describe
from rlctl.dashboard.formats import duration, error_factor, number
from rlctl.dashboard.safe_console import SafeConsole
from rlctl.dashboard.state import SILENT, RunReader, read_state
from rlctl.dashboard.summary import say_goodbye
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.jsonl import Record, Tail
from rlctl.utils.escapes import neutral

HEADER_EVERY = 30
POLL_S = 0.25
# A row fits 80 columns.
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


class LineFormat:
    """Turns records into lines. `every`: print only each so-many-th step."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._printed = 0
        self._columns = COLUMNS["grpo"]

    def event(self, event: Record) -> Iterator[str]:
        kind = event.get("kind")
        if kind == "run_started":
            self._columns = COLUMNS.get(str(event.get("algorithm")), COLUMNS["grpo"])
        if kind == "startup" and event.get("seconds") is not None:
            yield f"startup     {event.get('what')} {duration(event['seconds'])}"
        elif kind and kind not in SILENT and kind not in ("validation_started", "run_ended"):
            yield _tagged(event)

    def metrics(self, record: Record) -> Iterator[str]:
        if record.get("kind") == "validation":
            shown = " ".join(f"{name.removeprefix('validation/')} {number(value)}" for name, value in _held_out(record))
            yield f"validation  step {record['step']}  {shown}"
        elif int(record["step"]) % self._every == 0:
            if "age/max" in record:
                self._columns = COLUMNS["async"]
            if self._printed % HEADER_EVERY == 0:
                yield self._row("step", "time", [label for label, _, _ in self._columns])
            self._printed += 1
            line = self._row(
                str(record["step"]),
                duration(record["time/step"]) if "time/step" in record else "-",
                [_cell(name, record.get(name)) for _, _, name in self._columns],
            )
            failed = int(record.get("reward/failed", 0))
            yield f"{line}  {failed} rewards failed" if failed else line

    def _row(self, step: str, time_: str, cells: list[str]) -> str:
        widths = [width for _, width, _ in self._columns]
        return f"{step:>5} {time_:>7}" + "".join(f" {cell:>{width}}" for cell, width in zip(cells, widths))


class LineView:
    """Prints a run's lines while the `with` block runs; at the end, the summary.

    every: only each so-many-th step. since: unix seconds; what was written before, by earlier attempts, is not shown.
    end: the run_ended event, told by the run itself.
    """

    def __init__(self, run: RunDir, every: int, since: float, out: TextIO | None = None) -> None:
        self._run = run
        self._events = Tail(run.events)
        self._metrics = Tail(run.metrics)
        self._format = LineFormat(every)
        self._out = out or sys.stdout
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="lines", daemon=True)
        self._since = since
        self._newest = 0.0
        self.end: Record | None = None

    def __enter__(self) -> "LineView":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._try_print()
        state = read_state(self._run.path)
        if self.end:
            state.end_with(self.end)
        say_goodbye(state, SafeConsole(file=self._out, width=None if self._out.isatty() else 200), self._failure)

    def wait(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Blocks until the run has ended or died, or is given up: for a viewer that is not the run itself."""
        reader = RunReader(self._run.path)
        while reader.state.status in ("new", "running") and self._failure is None and not given_up():
            time.sleep(POLL_S)
            reader.poll()

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            self._try_print()

    def _try_print(self) -> None:
        """Prints what is new until that fails, for example because the reader of a pipe is gone."""
        if self._failure is None:
            try:
                self._print_new()
            except Exception as failure:
                self._failure = failure

    def _print_new(self) -> None:
        events, metrics = self._events.read(), self._unseen_metrics()
        pairs = [(event, self._format.event) for event in events] + [(each, self._format.metrics) for each in metrics]
        recent = [pair for pair in pairs if float(pair[0].get("time", 0.0)) >= self._since]
        for record, lines in sorted(recent, key=lambda pair: float(pair[0]["time"])):
            for line in lines(record):
                print(neutral(line).encode("ascii", "replace").decode(), file=self._out, flush=True)

    def _unseen_metrics(self) -> list[Record]:
        """A restart drops what will be done again by replacing the file, which is then read from its beginning."""
        unseen = [record for record in self._metrics.read() if float(record.get("time", 0.0)) > self._newest]
        self._newest = max((float(record["time"]) for record in unseen), default=self._newest)
        return unseen


def _tagged(event: Record) -> str:
    kind = str(event["kind"])
    tag = {"run_started": "run", "engine_lost": "engine", "engine_restarted": "engine"}.get(kind, kind)
    text = describe(event)[0]
    return f"{tag:<11} {text.removeprefix(f'{tag}: ').removeprefix(f'{tag} ')}"


def _held_out(record: Record) -> list[tuple[str, float]]:
    return [(name, value) for name, value in record.items() if name.startswith("validation/")]


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.startswith("idle/"):
        return f"{value:.0%}"
    return error_factor(value) if name.startswith("mismatch/") else number(value)
