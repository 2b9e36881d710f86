"""Results of `rlctl bench refit`, computed from the times that each process recorded."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rlctl.bench.frame import Cells, Line, Results, ResultTable
from rlctl.bench.rounds import Measured
from rlctl.dashboard.formats import count

PHASES = ("pack", "wire", "load")
_SCHEMES_LEGEND = (
    "ms: median until every engine holds every tensor; share: of the plain link's rate; pause: no sampling; "
    "stall: longest gap between two tokens of running requests beyond their usual one, which is step; driver: ms of "
    "such a refit as the driver sees it; memory: peak on the device beyond the weights, trainer + engine; bits: "
    "compared with what was sent"
)


@dataclass(frozen=True)
class SchemeRow:
    """Results of one scheme: the plain link, or a refit with some settings. Times: median seconds without round 1."""

    label: str
    mode: str  # staged or direct; "" for rows that are not a refit
    seconds: float  # from the common begin until the last engine has every tensor
    commit: float  # time to replace the live weights by the received ones
    phases: dict[str, float]  # phase -> time of the slowest process
    trainer_extra: int  # peak device memory of the largest process above its weights, bytes
    engine_extra: int
    trainer_growth: int  # growth of resident host memory over the rounds, bytes
    engine_growth: int
    checked: bool  # True if delivered weights were compared with the sent ones
    wrong: list[str] = field(default_factory=list)  # names of tensors that differ in a bit from the sent ones
    driver: float | None = None  # time of a whole refit while requests run, measured in the driver
    stall: float | None = None  # longest gap between two tokens of a request during a refit, minus `step`
    step: float | None = None  # usual gap between two tokens of a request

    @property
    def pause(self) -> float:
        """Seconds in which engines could not sample. With staged weights this is the commit alone."""
        return self.commit if self.mode == "staged" else self.seconds + self.commit

    @property
    def overlap(self) -> float | None:
        """Share (0 to 1) of the shorter phases' time that ran at the same time as the longest phase.

        None if the shorter phases take less than 2% of the whole.
        """
        total = sum(self.phases.values())
        longest = max(self.phases.values(), default=0.0)
        hideable = total - longest
        if hideable < 0.02 * self.seconds:
            return None
        return min(1.0, max(0.0, (total - self.seconds) / hideable))


@dataclass(frozen=True)
class RefitResults(Results):
    """Results: a row for each scheme."""

    model: str
    payload: int  # bytes that each engine receives
    trainers: int
    engines: int
    tensor_parallel: int
    bound: float  # seconds of `payload` over the plain link
    rows: list[SchemeRow]

    def rate(self, row: SchemeRow) -> float:
        """Return the GB/s delivered to each engine."""
        return self.payload / row.seconds / 1e9

    def share(self, row: SchemeRow) -> float:
        """Return the row's rate divided by the plain link's."""
        return self.bound / row.seconds

    def derived_figures(self, row: SchemeRow) -> dict[str, Any]:
        return {"gb_per_s": self.rate(row), "share": self.share(row), "overlap": row.overlap, "pause": row.pause}

    def report(self, wide: bool) -> list[Line | ResultTable]:
        size = self.payload / 1e9
        devices = f" x {self.tensor_parallel} devices" if self.tensor_parallel > 1 else ""
        bound = f"{size:.2f} GB need {self.bound * 1e3:.1f} ms at the link's {size / self.bound:.1f} GB/s"
        rlctl_rows = [index for index, row in enumerate(self.rows) if row.mode]
        table = ResultTable([self._cells(row, wide) for row in self.rows], bold=rlctl_rows)
        return [Line(f"{self.model}, {self._ends}{devices}: {bound}"), table, Line(_SCHEMES_LEGEND, "dim")]

    def errors(self) -> list[str]:
        """Return a line for each row whose delivered weights differ from the sent ones. It names up to 3 tensors."""
        messages = []
        for row in self.rows:
            if row.wrong:
                names = ", ".join(row.wrong[:3])
                further = f" and {len(row.wrong) - 3} more" if len(row.wrong) > 3 else ""
                messages.append(f"{row.label}: delivered weights differ from the sent ones: {names}{further}")
        return messages

    @property
    def _ends(self) -> str:
        return f"{count(self.trainers, 'trainer rank')} to {count(self.engines, 'engine')}"

    def _cells(self, row: SchemeRow, wide: bool) -> Cells:
        memory = f"{row.trainer_extra / 2**30:.1f}+{row.engine_extra / 2**30:.1f} GiB"
        cells = [
            ("scheme", row.label),
            ("ms", _ms(row.seconds)),
            ("GB/s", f"{self.rate(row):.1f}"),
            ("share", f"{self.share(row):.0%}"),
        ]
        if wide:
            cells += [(name, _ms(row.phases.get(name))) for name in PHASES]
        cells += [("pause", _ms(row.pause) if row.checked else ""), ("stall", _ms(row.stall))]
        if wide:
            overlap = "" if row.overlap is None else f"{row.overlap:.0%}"
            cells += [("step", _ms(row.step)), ("driver", _ms(row.driver)), ("overlap", overlap)]
        return [
            *cells,
            ("memory", memory if row.trainer_extra or row.engine_extra else ""),
            ("bits", ("differ" if row.wrong else "equal") if row.checked else ""),
        ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def make_row(
    label: str, sent: list[Measured], received: list[Measured], differences: list[str] | None = None, mode: str = ""
) -> SchemeRow:
    """Return a scheme's row. sent, received: the records of all trainer ranks, and of all engine workers.

    differences: names of tensors that differ from the sent ones; None if nothing was compared.
    """
    # The first round warms up. It counts only if it is the only one.
    rounds = range(1 if len(received[0].ends) > 1 else 0, len(received[0].ends))
    seconds = []
    commits = []
    for number in rounds:
        begin = min(process.begins[number] for process in sent + received)
        # The commit follows the delivery. `SchemeRow.seconds` ends with the delivery.
        commit = max(process.commits[number] for process in received)
        seconds.append(max(process.ends[number] for process in received) - begin - commit)
        commits.append(commit)
    phases = {}
    for name in PHASES:
        seconds_by_side = []
        for side in (sent, received):
            slowest = [max(process.phases[number].get(name, 0.0) for process in side) for number in rounds]
            side_seconds = median(slowest)
            # A side that has no such phase has 0 seconds.
            if side_seconds:
                seconds_by_side.append(side_seconds)
        # For the phase wire take the shorter side's time, because the longer side's includes waiting for the shorter.
        if seconds_by_side:
            phases[name] = min(seconds_by_side) if name == "wire" else max(seconds_by_side)
    return SchemeRow(
        label=label,
        mode=mode,
        seconds=median(seconds),
        commit=median(commits),
        phases=phases,
        trainer_extra=max(process.extra_bytes for process in sent),
        engine_extra=max(process.extra_bytes for process in received),
        trainer_growth=max(process.growth_bytes for process in sent),
        engine_growth=max(process.growth_bytes for process in received),
        checked=differences is not None,
        wrong=differences or [],
    )
