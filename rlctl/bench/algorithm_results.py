"""The arithmetic of `rlctl bench algorithms`: learning curves, where each reaches the target, table and chart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rlctl.bench.charts import Curve, CurveChart
from rlctl.bench.frame import Cells, Line, Results, ResultTable
from rlctl.config.schema import GrpoConfig
from rlctl.grpo import metric_rows
from rlctl.telemetry.clock import STEP_SECONDS
from rlctl.telemetry.jsonl import Record


@dataclass(frozen=True)
class LearningCurve:
    """One run: lists have an entry for each validation."""

    seed: int
    steps: list[int]
    rollouts: list[int]  # sampled for the steps until then, trained or not
    seconds: list[float]  # of the steps until then, without validation
    accuracy: list[float]
    tokens: int  # generated in the whole run
    wasted: float  # share in groups that were not trained

    def reached(self, target: float) -> int | None:
        """Return the index of the first validation at the target that the next one confirms; None without one.

        Nothing can confirm the last one, so it counts as it is.
        """
        for index, value in enumerate(self.accuracy):
            if value >= target and self.accuracy[min(index + 1, len(self.accuracy) - 1)] >= target:
                return index
        return None


def learning_curve(seed: int, records: Sequence[Record], config: GrpoConfig) -> LearningCurve:
    """Return the curve of a run with this config from its metrics. Raises RuntimeError without any accuracy."""
    curve = LearningCurve(seed, [], [], [], [], tokens=0, wasted=0.0)
    rollouts, seconds, tokens, wasted = 0, 0.0, 0.0, 0.0
    for record in records:
        if record["kind"] == "step":
            extra = record.get(metric_rows.REPLACED_GROUPS.name, 0.0) + record.get(metric_rows.SURPLUS_GROUPS.name, 0.0)
            rollouts += int(config.grpo.num_prompts_per_step + extra) * config.grpo.num_generations_per_prompt
            seconds += record[STEP_SECONDS.name]
            generated = record[metric_rows.GENERATED_TOKENS.name] + record.get(metric_rows.SURPLUS_TOKENS.name, 0.0)
            tokens, wasted = tokens + generated, wasted + generated * record.get(metric_rows.WASTED_TOKENS.name, 0.0)
        elif metric_rows.HELD_OUT_ACCURACY.name in record:
            curve.steps.append(record["step"])
            curve.rollouts.append(rollouts)
            curve.seconds.append(seconds)
            curve.accuracy.append(record[metric_rows.HELD_OUT_ACCURACY.name])
    if not curve.accuracy:
        raise RuntimeError(f"seed {seed}: no held-out accuracy was measured")
    return LearningCurve(**{**vars(curve), "tokens": int(tokens), "wasted": wasted / max(1.0, tokens)})


@dataclass(frozen=True)
class AlgorithmRow:
    """One algorithm with its finished runs, at least one."""

    name: str
    runs: list[LearningCurve]

    @property
    def start(self) -> float:
        return fmean(run.accuracy[0] for run in self.runs)

    @property
    def ends(self) -> list[float]:
        return [run.accuracy[-1] for run in self.runs]

    @property
    def step(self) -> float:
        """Mean seconds of a step."""
        return fmean(run.seconds[-1] / max(1, run.steps[-1]) for run in self.runs)

    def to_target(self, target: float) -> tuple[int, float | None, float | None]:
        """Return (runs that reach it, their mean rollouts, their mean seconds until then)."""
        points = [(run, index) for run in self.runs if (index := run.reached(target)) is not None]
        if not points:
            return 0, None, None
        return (
            len(points),
            fmean(run.rollouts[index] for run, index in points),
            fmean(run.seconds[index] for run, index in points),
        )


@dataclass(frozen=True)
class AlgorithmResults(Results):
    """Rows of all algorithms."""

    recipe: str
    seeds: int  # asked for
    steps: int
    target: float
    rows: list[AlgorithmRow]
    failed: list[str]  # a line for each run that failed
    interrupted: bool = False

    def derived(self, row: AlgorithmRow) -> dict[str, Any]:
        reached, rollouts, seconds = row.to_target(self.target)
        to_target = {"reached": reached, "rollouts": rollouts, "seconds": seconds}
        end = {"mean": fmean(row.ends), "min": min(row.ends), "max": max(row.ends)}
        return {"start": row.start, "end": end, "to_target": to_target, "seconds_per_step": row.step}

    def report(self, wide: bool) -> list[Line | ResultTable]:
        best = max(fmean(row.ends) for row in self.rows)
        bold = [index for index, row in enumerate(self.rows) if fmean(row.ends) == best]
        title = f"{self.recipe}, {self.steps} steps, {self.seeds} seed{'s' if self.seeds > 1 else ''}"
        table = ResultTable([self._cells(row, wide) for row in self.rows], bold)
        return [Line(title), table, Line(self._legend(wide), "dim")]

    def chart(self) -> CurveChart:
        band = f", mean of {self.seeds} seeds in a band from the least to the greatest" if self.seeds > 1 else ""
        title, label = f"{self.recipe}{band}", f"held-out accuracy; dashed: {self.target:g}"
        return CurveChart(title, label, [_curve(row) for row in self.rows], self.target)

    def errors(self) -> list[str]:
        return self.failed

    def _cells(self, row: AlgorithmRow, wide: bool) -> Cells:
        reached, rollouts, seconds = row.to_target(self.target)
        low, high = min(row.ends), max(row.ends)
        more = [
            ("reached", f"{reached} of {len(row.runs)}"),
            ("tokens", f"{fmean(run.tokens for run in row.runs):,.0f}"),
            ("wasted", f"{fmean(run.wasted for run in row.runs):.0%}"),
            ("seconds", f"{fmean(run.seconds[-1] for run in row.runs):,.0f}"),
        ]
        missed = f" ({reached}/{len(row.runs)})" if 0 < reached < len(row.runs) and not wide else ""
        return [
            ("algorithm", row.name),
            ("start", f"{row.start:.3f}"),
            ("end", f"{fmean(row.ends):.3f}"),
            ("min..max", f"{low:.3f}..{high:.3f}"),
            (f"rollouts to {self.target:g}", "never" if rollouts is None else f"{rollouts:,.0f}{missed}"),
            ("s to it", "" if seconds is None else f"{seconds:,.0f}"),
            ("s/step", f"{row.step:.2f}"),
            *(more if wide else []),
        ]

    def _legend(self, wide: bool) -> str:
        more = (
            "; reached: runs that did; tokens: generated in a run; wasted: share of them that is not trained; seconds: "
            "of the steps of a whole run"
        )
        return (
            f"start, end: held-out accuracy, mean over seeds; rollouts, s to {self.target:g}: sampled rollouts and "
            f"seconds of training until an accuracy of {self.target:g} that the next validation confirms, mean of the "
            f"runs that reach it{more if wide else ''}"
        )


def _curve(row: AlgorithmRow) -> Curve:
    def of_runs(of: Callable[[Sequence[float]], float], name: str) -> list[float]:
        return [of(values) for values in zip(*(getattr(run, name) for run in row.runs))]

    x: dict[str, Sequence[float]] = {
        "rollouts sampled": of_runs(fmean, "rollouts"),
        "seconds of training": of_runs(fmean, "seconds"),
    }
    return Curve(row.name, x, *(of_runs(each, "accuracy") for each in (fmean, min, max)))
