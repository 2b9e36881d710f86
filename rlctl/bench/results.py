"""What `rlctl bench refit` found, and the arithmetic from what each process saw. Pure."""

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rlctl.bench.rounds import Measured

PHASES = ("gather", "pack", "wire", "load")


@dataclass(frozen=True)
class Row:
    """One scheme. Times in seconds, medians over the rounds after the first.

    seconds: from the common begin to the last engine holding every tensor. commit: making them live. phases: of the
    slowest process. trainer_extra, engine_extra: bytes of device memory at the peak beyond what weights take.
    driver: of a whole refit as the driver sees it while requests run. stall: of those requests, beyond their
    ordinary gap between tokens. checked: whether delivered weights were
    compared; wrong: tensors of which a bit differs from what was sent. mode: of rlctl's refit,
    "" for other rows.
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
        """How long engines could not sample: during the commit alone where weights were staged."""
        return self.commit if self.mode == "staged" else self.seconds + self.commit

    @property
    def overlap(self) -> float | None:
        """Of the time that could hide behind the longest phase, the part that did; None if there is none to hide."""
        total, longest = sum(self.phases.values()), max(self.phases.values(), default=0.0)
        hideable = total - longest
        if hideable < 0.02 * self.seconds:
            return None
        return min(1.0, max(0.0, (total - self.seconds) / hideable))


@dataclass(frozen=True)
class Results:
    """All rows. payload: bytes of one copy of the weights. bound: seconds of those bytes over the plain link."""

    model: str
    payload: int
    trainers: int
    engines: int
    tensor_parallel: int
    bound: float
    rows: list[Row]

    @property
    def wrong(self) -> list[Row]:
        """Rows whose weights arrived changed."""
        return [row for row in self.rows if row.wrong]

    def rate(self, row: Row) -> float:
        """GB/s delivered to each engine."""
        return self.payload / row.seconds / 1e9

    def share(self, row: Row) -> float:
        """Of the plain link's rate."""
        return self.bound / row.seconds

    def as_json(self) -> dict[str, Any]:
        """Everything, with the derived figures."""
        rows = [
            asdict(row)
            | {"gb_per_s": self.rate(row), "share": self.share(row), "overlap": row.overlap, "pause": row.pause}
            for row in self.rows
        ]
        return {**{key: value for key, value in asdict(self).items() if key != "rows"}, "rows": rows}


def make_row(
    label: str, sent: list[Measured], received: list[Measured], wrong: list[str] | None = None, mode: str = ""
) -> Row:
    """A row from what every trainer rank and engine worker saw."""
    rounds = range(1 if len(received[0].ends) > 1 else 0, len(received[0].ends))
    seconds, commits = [], []
    for number in rounds:
        begin = min(part.begins[number] for part in (*sent, *received))
        commit = max(part.commits[number] for part in received)
        seconds.append(max(part.ends[number] for part in received) - begin - commit)
        commits.append(commit)
    return Row(
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
    """Of each phase the slowest process; of the wire the shorter end, for the other one's begins with waiting."""
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
