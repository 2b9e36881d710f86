"""`rlctl bench algorithms`: trains one recipe with several algorithms and seeds, and compares how fast they learn.

An algorithm is a file with a few keys that are merged over any recipe (such as those in recipes/algorithms), or some
overrides, or both.
"""

import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from rlctl.bench.charts import Curve, CurveChart
from rlctl.bench.frame import Bench, Cells, Line, Results, ResultTable, Say, until_interrupted
from rlctl.bench.runs import Watch, train, train_command
from rlctl.config.builtin import ALGORITHMS, algorithm_names, find, find_recipe
from rlctl.config.errors import ConfigError, Problem, did_you_mean
from rlctl.config.schema import GrpoConfig
from rlctl.dashboard.formats import span
from rlctl.grpo import metric_rows
from rlctl.grpo.metric_rows import HELD_OUT_ACCURACY
from rlctl.preflight.load import load
from rlctl.telemetry.clock import STEP_SECONDS
from rlctl.telemetry.jsonl import Record

_BARE = ("checkpoint.every=0", "checkpoint.at_end=false", "telemetry.dashboard=off")


@dataclass(frozen=True)
class LearningCurve:
    """Course of one run. Each list has one entry for each validation."""

    seed: int
    steps: list[int]
    rollouts: list[int]  # sampled until the validation, trained or not
    seconds: list[float]  # of the steps until the validation, without validations
    accuracy: list[float]  # held-out, 0 to 1
    tokens: int  # generated in the whole run
    wasted: float  # share of these tokens in groups that were not trained

    def find_target(self, target: float) -> int | None:
        """Return the index of the first validation that reaches the target, if the next validation reaches it too.

        The last validation needs no confirmation. Return None if no validation qualifies.
        """
        for index, value in enumerate(self.accuracy):
            if value >= target and self.accuracy[min(index + 1, len(self.accuracy) - 1)] >= target:
                return index
        return None


def learning_curve(seed: int, records: Sequence[Record], config: GrpoConfig) -> LearningCurve:
    """Return the curve of a run from its metrics and its config. Raises RuntimeError without a held-out accuracy."""
    curve = LearningCurve(seed, [], [], [], [], tokens=0, wasted=0.0)
    rollouts = 0
    seconds = 0.0
    tokens = 0.0
    wasted_tokens = 0.0
    for record in records:
        if record["kind"] == "step":
            # Groups that were sampled but not trained.
            further_groups = record.get(metric_rows.REPLACED_GROUPS.name, 0.0)
            further_groups += record.get(metric_rows.SURPLUS_GROUPS.name, 0.0)
            rollouts += int(config.grpo.num_prompts_per_step + further_groups) * config.grpo.num_generations_per_prompt
            seconds += record[STEP_SECONDS.name]
            generated = record[metric_rows.GENERATED_TOKENS.name] + record.get(metric_rows.SURPLUS_TOKENS.name, 0.0)
            tokens = tokens + generated
            # WASTED_TOKENS is a share.
            wasted_tokens += generated * record.get(metric_rows.WASTED_TOKENS.name, 0.0)
        elif metric_rows.HELD_OUT_ACCURACY.name in record:
            curve.steps.append(record["step"])
            curve.rollouts.append(rollouts)
            curve.seconds.append(seconds)
            curve.accuracy.append(record[metric_rows.HELD_OUT_ACCURACY.name])
    if not curve.accuracy:
        raise RuntimeError(f"seed {seed}: no held-out accuracy was measured")
    return LearningCurve(**{**vars(curve), "tokens": int(tokens), "wasted": wasted_tokens / max(1.0, tokens)})


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
        """Return (number of runs that reach the target, their mean rollouts until then, their mean seconds until then).

        The means are None if no run reaches the target.
        """
        indices = [run.find_target(target) for run in self.runs]
        points = [(run, index) for run, index in zip(self.runs, indices) if index is not None]
        if not points:
            return 0, None, None
        return (
            len(points),
            fmean(run.rollouts[index] for run, index in points),
            fmean(run.seconds[index] for run, index in points),
        )


@dataclass(frozen=True)
class AlgorithmResults(Results):
    """Results of all algorithms, a row for each."""

    recipe: str
    seeds: int  # as requested; a failed or interrupted run has no curve
    steps: int
    target: float  # held-out accuracy
    rows: list[AlgorithmRow]
    failed: list[str]  # a line for each run that failed
    interrupted: bool = False

    def derived_figures(self, row: AlgorithmRow) -> dict[str, Any]:
        num_reached, rollouts, seconds = row.to_target(self.target)
        to_target = {"reached": num_reached, "rollouts": rollouts, "seconds": seconds}
        end = {"mean": fmean(row.ends), "min": min(row.ends), "max": max(row.ends)}
        return {"start": row.start, "end": end, "to_target": to_target, "seconds_per_step": row.step}

    def report(self, wide: bool) -> list[Line | ResultTable]:
        best = max(fmean(row.ends) for row in self.rows)
        bold = [index for index, row in enumerate(self.rows) if fmean(row.ends) == best]
        title = f"{self.recipe}, {self.steps} steps, {self.seeds} seed{'s' if self.seeds > 1 else ''}"
        table = ResultTable([self._algorithm_cells(row, wide) for row in self.rows], bold)
        return [Line(title), table, Line(self._legend(wide), "dim")]

    def chart(self) -> CurveChart:
        band = f", mean of {self.seeds} seeds in a band from the least to the greatest" if self.seeds > 1 else ""
        title = f"{self.recipe}{band}"
        label = f"held-out accuracy; dashed: {self.target:g}"
        return CurveChart(title, label, [_curve(row) for row in self.rows], self.target)

    def errors(self) -> list[str]:
        return self.failed

    def _algorithm_cells(self, row: AlgorithmRow, wide: bool) -> Cells:
        num_reached, rollouts, seconds = row.to_target(self.target)
        low = min(row.ends)
        high = max(row.ends)
        further_cells = [
            ("reached", f"{num_reached} of {len(row.runs)}"),
            ("tokens", f"{fmean(run.tokens for run in row.runs):,.0f}"),
            ("wasted", f"{fmean(run.wasted for run in row.runs):.0%}"),
            ("seconds", f"{fmean(run.seconds[-1] for run in row.runs):,.0f}"),
        ]
        share = f" ({num_reached}/{len(row.runs)})" if 0 < num_reached < len(row.runs) and not wide else ""
        cells = [
            ("algorithm", row.name),
            ("start", f"{row.start:.3f}"),
            ("end", f"{fmean(row.ends):.3f}"),
            ("min..max", f"{low:.3f}..{high:.3f}"),
            (f"rollouts to {self.target:g}", "never" if rollouts is None else f"{rollouts:,.0f}{share}"),
            ("s to it", "" if seconds is None else f"{seconds:,.0f}"),
            ("s/step", f"{row.step:.2f}"),
        ]
        return cells + further_cells if wide else cells

    def _legend(self, wide: bool) -> str:
        further_columns = (
            "; reached: runs that did; tokens: generated in a run; wasted: share of them that is not trained; seconds: "
            "of the steps of a whole run"
        )
        return (
            f"start, end: held-out accuracy, mean over seeds; rollouts, s to {self.target:g}: sampled rollouts and "
            f"seconds of training until an accuracy of {self.target:g} that the next validation confirms, mean of the "
            f"runs that reach it{further_columns if wide else ''}"
        )


def _curve(row: AlgorithmRow) -> Curve:
    """Return the curve of an algorithm: mean, least and greatest accuracy over its runs at each validation."""

    def summarize(name: str, function: Callable[[Sequence[float]], float]) -> list[float]:
        """Apply `function` to the values of all runs at each validation. name: field of `LearningCurve`."""
        values_by_run = [getattr(run, name) for run in row.runs]
        return [function(values) for values in zip(*values_by_run)]

    x: dict[str, Sequence[float]] = {
        "rollouts sampled": summarize("rollouts", fmean),
        "seconds of training": summarize("seconds", fmean),
    }
    return Curve(
        name=row.name,
        x=x,
        mean=summarize("accuracy", fmean),
        least=summarize("accuracy", min),
        greatest=summarize("accuracy", max),
    )


@dataclass(frozen=True)
class AlgorithmBench(Bench):
    """GRPO runs of one recipe, one for each algorithm and seed, one after the other."""

    algorithms: list[str]  # as given: a name, a file, overrides, or a name and overrides in one text
    recipe: str
    seeds: int
    steps: int | None  # None: the recipe's
    target: float  # accuracy for which rollouts and seconds are counted
    extra: list[str]  # overrides for every run

    def check(self) -> list[Problem]:
        # Problem -> names of the algorithms that have it.
        names_by_problem: dict[str, list[str]] = {}
        repeated_names = {name for name in self.algorithms if self.algorithms.count(name) > 1}
        if repeated_names:
            names_by_problem["named twice"] = sorted(repeated_names)
        with tempfile.TemporaryDirectory(prefix="rlctl-bench-") as folder:
            for name in dict.fromkeys(self.algorithms):
                try:
                    config = self.config_of(name, Path(folder))
                except ConfigError as error:
                    for problem in error.problems:
                        # Remove the override's number: it counts in a command that the user has not typed.
                        message = re.sub(r"^override \d+: ", "", str(problem))
                        names_by_problem.setdefault(message, []).append(name)
                    continue
                if not config.data.has_validation or not config.validation.every:
                    message = (
                        "held-out accuracy is compared: set data.validation.path or fraction, and validation.every"
                    )
                    names_by_problem.setdefault(message, []).append(name)
        return [Problem(", ".join(names), "", message) for message, names in names_by_problem.items()]

    def measure(self, folder: Path, say: Say) -> AlgorithmResults:
        """Run every algorithm with one seed before the next seed, so that results can be compared after Ctrl-C.

        A run that fails is left out of the rows, and listed in `AlgorithmResults.failed`.
        """
        configs = {name: self.config_of(name, folder) for name in self.algorithms}
        progress = _Progress(say, [config.grpo.num_steps for config in configs.values()] * self.seeds)
        curves: dict[str, list[LearningCurve]] = {name: [] for name in self.algorithms}
        failed = list[str]()

        def measure_runs() -> Iterator[tuple[str, LearningCurve]]:
            for seed, (name, config) in product(range(self.seeds), configs.items()):
                try:
                    with progress.run(f"{name}, seed {seed}"):
                        records = self._run_once(name, seed, folder, progress.watch)
                    curve = learning_curve(seed, records, config)
                except RuntimeError as error:
                    failed.append(str(error))
                else:
                    yield name, curve

        named_curves, interrupted = until_interrupted(measure_runs())
        for name, curve in named_curves:
            curves[name].append(curve)
        rows = [AlgorithmRow(name, runs) for name, runs in curves.items() if runs]
        if not rows:
            raise RuntimeError("; ".join(failed))
        steps = max(config.grpo.num_steps for config in configs.values())
        return AlgorithmResults(
            recipe=self.recipe,
            seeds=self.seeds,
            steps=steps,
            target=self.target,
            rows=rows,
            failed=failed,
            interrupted=interrupted,
        )

    def _run_once(self, name: str, seed: int, folder: Path, watch: Watch) -> list[Record]:
        run = folder / _file_name(f"{name}-seed-{seed}")
        recipe, overrides = self._write_recipe(name, folder)
        run_settings = [f"run.dir={folder}", f"run.name={run.name}", f"run.seed={seed}"]
        return train(f"{name}, seed {seed}", train_command("grpo", recipe, [*overrides, *run_settings]), run, watch)

    def config_of(self, name: str, folder: Path) -> GrpoConfig:
        """Return the config of the runs of the algorithm `name`. Raises ConfigError if it is invalid."""
        recipe, overrides = self._write_recipe(name, folder)
        return load("grpo", recipe, overrides).settled.config

    def _write_recipe(self, name: str, folder: Path) -> tuple[str, list[str]]:
        """Write a recipe that merges the algorithm's file over the bench's recipe; return (recipe, overrides)."""
        algorithm_file, algorithm_overrides = _find_algorithm(name)
        files = [find_recipe(self.recipe)]
        if algorithm_file:
            files.append(algorithm_file)
        recipe = folder / f"{_file_name(name)}.yaml"
        recipe.write_text(yaml.safe_dump({"defaults": [str(file) for file in files]}))
        steps = [] if self.steps is None else [f"grpo.num_steps={self.steps}"]
        # If several overrides have the same key, the last one wins.
        return str(recipe), steps + self.extra + algorithm_overrides + list(_BARE)


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)


def _find_algorithm(name: str) -> tuple[Path | None, list[str]]:
    """Return (file or None, overrides) of an algorithm, for example of "grpo grpo.loss.clip_high=0.4".

    Raises ConfigError if there is no such algorithm.
    """
    try:
        words = shlex.split(name)
    except ValueError as error:
        raise ConfigError([Problem("", "", str(error).lower())]) from None
    overrides = [word for word in words if "=" in word]
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError([Problem("", "", f"{files[0]} and {files[1]}: an algorithm is at most one file")])
    if not files:
        return None, overrides
    file = find(files[0], ALGORITHMS if files[0] in algorithm_names() else Path.cwd())
    if file is None:
        hint = did_you_mean(files[0], algorithm_names())
        message = f"no such algorithm{hint}; allowed: {', '.join(algorithm_names())}, a file, or key=value"
        raise ConfigError([Problem("", "", message)])
    return file, overrides


@dataclass
class _Progress:
    """Display of progress over all runs, with an estimate of the time that is left."""

    say: Say
    steps: list[int]  # of each run
    _label: str = ""
    _done_runs: int = 0
    # Newest step of the current run.
    _step: int = 0
    _began: float = field(default_factory=time.monotonic)

    @contextmanager
    def run(self, label: str) -> Iterator[None]:
        """Show that a run begins. Count the run as done when the block ends."""
        self._label = label
        self._step = 0
        self._report("")
        yield
        # Not in `finally`: a failed run's steps are not done.
        self._done_runs += 1

    def watch(self, records: Sequence[Record]) -> None:
        """Take the new records of the current run; show the accuracy of each validation."""
        for record in records:
            self._step = int(record["step"])
            if record["kind"] == "validation":
                self._report(f": step {self._step}, accuracy {record.get(HELD_OUT_ACCURACY.name, float('nan')):.3f}")

    def _report(self, news: str) -> None:
        total_steps = sum(self.steps)
        spent_s = time.monotonic() - self._began
        done_steps = sum(self.steps[: self._done_runs]) + self._step
        rest = f"; {span(spent_s * (total_steps - done_steps) / done_steps)} left" if done_steps else ""
        self.say(f"{self._label} (run {self._done_runs + 1} of {len(self.steps)}){news}{rest}")
