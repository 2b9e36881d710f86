"""Results of `rlctl bench refit`, and the arithmetic from the moments that each process recorded."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rlctl.bench.frame import Bar, Cells, Chart, Line, Results, ResultTable, plural
from rlctl.bench.rounds import Measured

PHASES = ("gather", "pack", "wire", "load")
_LEGEND = (
    "ms: median until every engine holds every tensor; share: of the plain link's rate; pause: no sampling; "
    "stall: longest gap between two tokens of running requests beyond their usual one, and ms of such a refit as "
    "the driver sees it; memory: peak on the device beside the weights, trainer and engine; bits: compared with "
    "what was sent"
)


@dataclass(frozen=True)
class SchemeRow:
    """One scheme. Times in seconds, medians over the rounds after the first.

    mode: of rlctl's refit, "" for other rows. seconds: from the common begin to the last engine holding every tensor.
    commit: to make them live. phases: of the slowest process. trainer_extra, engine_extra: bytes of device memory at
    the peak beyond the weights' own; trainer_growth, engine_growth: of host memory. checked: delivered weights were
    compared; wrong: tensors of which a bit differs from what was sent. While requests run, driver: a whole refit as the
    driver sees it; stall: of those requests, beyond their ordinary gap between tokens.
    """

    label: str
    mode: str
    seconds: float
    commit: float
    phases: dict[str, float]
    trainer_extra: int
    engine_extra: int
    trainer_growth: int
    engine_growth: int
    checked: bool
    wrong: list[str] = field(default_factory=list)
    driver: float | None = None
    stall: float | None = None

    @property
    def pause(self) -> float:
        """Seconds in which engines could not sample: the commit alone where weights were staged."""
        return self.commit if self.mode == "staged" else self.seconds + self.commit

    @property
    def overlap(self) -> float | None:
        """Share of the time that could hide behind the longest phase, and did; None if there is none to hide."""
        total, longest = sum(self.phases.values()), max(self.phases.values(), default=0.0)
        hideable = total - longest
        if hideable < 0.02 * self.seconds:
            return None
        return min(1.0, max(0.0, (total - self.seconds) / hideable))


@dataclass(frozen=True)
class RefitResults(Results):
    """Rows of all schemes. payload: bytes of one copy of the weights. bound: seconds of those over the plain link."""

    model: str
    payload: int
    trainers: int
    engines: int
    tensor_parallel: int
    bound: float
    rows: list[SchemeRow]

    def rate(self, row: SchemeRow) -> float:
        """Return the GB/s delivered to each engine."""
        return self.payload / row.seconds / 1e9

    def share(self, row: SchemeRow) -> float:
        """Return the row's rate against the plain link's."""
        return self.bound / row.seconds

    def derived(self, row: SchemeRow) -> dict[str, Any]:
        return {"gb_per_s": self.rate(row), "share": self.share(row), "overlap": row.overlap, "pause": row.pause}

    def report(self, wide: bool) -> list[Line | ResultTable]:
        """Return the bound, the table, and what its columns mean."""
        size = self.payload / 1e9
        devices = f" x {self.tensor_parallel} devices" if self.tensor_parallel > 1 else ""
        bound = f"{size:.2f} GB need {self.bound * 1e3:.1f} ms at the link's {size / self.bound:.1f} GB/s"
        ours = [index for index, row in enumerate(self.rows) if row.mode]
        table = ResultTable([self._cells(row, wide) for row in self.rows], bold=ours)
        return [Line(f"{self.model}, {self._ends}{devices}: {bound}"), table, Line(_LEGEND, "dim")]

    def chart(self) -> Chart:
        bars = [
            Bar(row.label, rate, f"{rate:.0f} GB/s, {self.share(row):.0%}", bool(row.mode))
            for row, rate in ((row, self.rate(row)) for row in self.rows)
        ]
        title = f"{self.model}: {self.payload / 1e9:.1f} GB, {self._ends}"
        label = "GB/s delivered to each engine; dashed: the plain link"
        return Chart(title, label, bars, self.payload / self.bound / 1e9)

    def errors(self) -> list[str]:
        """Return the tensors of each row that arrived changed, the first three by name."""
        found = []
        for row in self.rows:
            names = ", ".join(row.wrong[:3]) + (f" and {len(row.wrong) - 3} more" if len(row.wrong) > 3 else "")
            if names:
                found.append(f"{row.label}: delivered weights differ from the sent ones: {names}")
        return found

    @property
    def _ends(self) -> str:
        return f"{plural(self.trainers, 'trainer rank')} to {plural(self.engines, 'engine')}"

    def _cells(self, row: SchemeRow, wide: bool) -> Cells:
        phases = [(name, _ms(row.phases.get(name))) for name in PHASES]
        driver = [("driver", _ms(row.driver)), ("overlap", "" if row.overlap is None else f"{row.overlap:.0%}")]
        return [
            ("scheme", row.label),
            ("ms", _ms(row.seconds)),
            ("GB/s", f"{self.rate(row):.1f}"),
            ("share", f"{self.share(row):.0%}"),
            *(phases if wide else []),
            ("pause", _ms(row.pause) if row.checked else ""),
            ("stall", _ms(row.stall)),
            *(driver if wide else []),
            ("memory", _memory(row)),
            ("bits", ("differ" if row.wrong else "equal") if row.checked else ""),
        ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _memory(row: SchemeRow) -> str:
    if not row.trainer_extra and not row.engine_extra:
        return ""
    return f"{row.trainer_extra / 2**30:.1f}+{row.engine_extra / 2**30:.1f} GiB"


def make_row(
    label: str, sent: list[Measured], received: list[Measured], wrong: list[str] | None = None, mode: str = ""
) -> SchemeRow:
    """Return the row of what every trainer rank and engine worker recorded. wrong: None if nothing was compared."""
    rounds = range(1 if len(received[0].ends) > 1 else 0, len(received[0].ends))
    seconds, commits = [], []
    for number in rounds:
        begin = min(part.begins[number] for part in (*sent, *received))
        commit = max(part.commits[number] for part in received)
        seconds.append(max(part.ends[number] for part in received) - begin - commit)
        commits.append(commit)
    return SchemeRow(
        label,
        mode,
        median(seconds),
        median(commits),
        _phases(sent, received, rounds),
        max(part.extra_bytes for part in sent),
        max(part.extra_bytes for part in received),
        max(part.growth_bytes for part in sent),
        max(part.growth_bytes for part in received),
        wrong is not None,
        wrong or [],
    )


def _phases(sent: list[Measured], received: list[Measured], rounds: range) -> dict[str, float]:
    """Return each phase's slowest process; of the wire the shorter end, for the other one's begins with waiting."""
    found = {}
    for name in PHASES:
        ends = [
            median(max(part.phases[number].get(name, 0.0) for part in side) for number in rounds)
            for side in (sent, received)
        ]
        value = min([end for end in ends if end] or [0.0]) if name == "wire" else max(ends)
        if value:
            found[name] = value
    return found
