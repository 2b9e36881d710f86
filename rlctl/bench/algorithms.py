"""`rlctl bench algorithms`: one recipe trained by several algorithms and seeds, and how fast each learns.

An algorithm is a file of a few keys that goes over any recipe (recipes/algorithms), overrides, or both.
"""

import re
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import yaml

from rlctl.bench.algorithm_results import AlgorithmResults, AlgorithmRow, LearningCurve, learning_curve
from rlctl.bench.frame import Bench, Say, until_interrupted
from rlctl.bench.runs import Watch, train, train_command
from rlctl.config.builtin import ALGORITHMS, algorithm_names, find, find_recipe
from rlctl.config.errors import ConfigError, Problem, did_you_mean
from rlctl.config.schema import GrpoConfig
from rlctl.dashboard.formats import span
from rlctl.grpo.metric_rows import HELD_OUT_ACCURACY
from rlctl.preflight.load import load
from rlctl.telemetry.jsonl import Record

_BARE = ("checkpoint.every=0", "checkpoint.at_end=false", "telemetry.dashboard=off")


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
        twice = {name for name in self.algorithms if self.algorithms.count(name) > 1}
        found: dict[str, list[str]] = {"named twice": sorted(twice)} if twice else {}
        with tempfile.TemporaryDirectory(prefix="rlctl-bench-") as folder:
            for name in dict.fromkeys(self.algorithms):
                try:
                    config = self.config_of(name, Path(folder))
                except ConfigError as error:
                    for problem in error.problems:
                        # The user has not seen the command that the override's number refers to.
                        found.setdefault(re.sub(r"^override \d+: ", "", str(problem)), []).append(name)
                    continue
                if not config.data.has_validation or not config.validation.every:
                    what = "held-out accuracy is compared: set data.validation.path or fraction, and validation.every"
                    found.setdefault(what, []).append(name)
        return [Problem(", ".join(names), "", what) for what, names in found.items()]

    def measure(self, folder: Path, say: Say) -> AlgorithmResults:
        """Measure seed by seed, so that the rows before Ctrl-C can be compared. A run that fails is left out."""
        configs = {name: self.config_of(name, folder) for name in self.algorithms}
        progress = _Progress(say, [config.grpo.num_steps for config in configs.values()] * self.seeds)
        curves: dict[str, list[LearningCurve]] = {name: [] for name in self.algorithms}
        failed = list[str]()

        def measured() -> Iterator[tuple[str, LearningCurve]]:
            for seed, (name, config) in product(range(self.seeds), configs.items()):
                try:
                    with progress.run(f"{name}, seed {seed}"):
                        records = self._run(name, seed, folder, progress.watch)
                    curve = learning_curve(seed, records, config)
                except RuntimeError as error:
                    failed.append(str(error))
                else:
                    yield name, curve

        found, interrupted = until_interrupted(measured())
        for name, curve in found:
            curves[name].append(curve)
        rows = [AlgorithmRow(name, runs) for name, runs in curves.items() if runs]
        if not rows:
            raise RuntimeError("; ".join(failed))
        steps = max(config.grpo.num_steps for config in configs.values())
        return AlgorithmResults(self.recipe, self.seeds, steps, self.target, rows, failed, interrupted)

    def _run(self, name: str, seed: int, folder: Path, watch: Watch) -> list[Record]:
        run = folder / _file_name(f"{name}-seed-{seed}")
        recipe, overrides = self._recipe(name, folder)
        own = [f"run.dir={folder}", f"run.name={run.name}", f"run.seed={seed}"]
        return train(f"{name}, seed {seed}", train_command("grpo", recipe, [*overrides, *own]), run, watch)

    def config_of(self, name: str, folder: Path) -> GrpoConfig:
        """Return the config of an algorithm's runs. Raises ConfigError."""
        return load("grpo", *self._recipe(name, folder)).settled.config

    def _recipe(self, name: str, folder: Path) -> tuple[str, list[str]]:
        """Write a recipe that puts the algorithm over the bench's recipe; return (recipe, overrides) of its runs."""
        file, own = _algorithm(name)
        steps = [] if self.steps is None else [f"grpo.num_steps={self.steps}"]
        recipe = folder / f"{_file_name(name)}.yaml"
        files = [find_recipe(self.recipe), *([file] if file else [])]
        recipe.write_text(yaml.safe_dump({"defaults": [str(file) for file in files]}))
        return str(recipe), [*steps, *self.extra, *own, *_BARE]


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)


def _algorithm(name: str) -> tuple[Path | None, list[str]]:
    """Return (file, overrides) of an algorithm as it was named. Raises ConfigError."""
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
    found = find(files[0], ALGORITHMS if files[0] in algorithm_names() else Path.cwd())
    if found is None:
        hint = did_you_mean(files[0], algorithm_names())
        what = f"no such algorithm{hint}; allowed: {', '.join(algorithm_names())}, a file, or key=value"
        raise ConfigError([Problem("", "", what)])
    return found, overrides


@dataclass
class _Progress:
    """Progress over all runs, and the time that the rest will take if runs go on as they did."""

    say: Say
    steps: list[int]  # of each run
    _label: str = ""
    _done: int = 0
    _step: int = 0
    _began: float = field(default_factory=time.monotonic)

    @contextmanager
    def run(self, label: str) -> Iterator[None]:
        """Count the run that the block makes."""
        self._label, self._step = label, 0
        self._tell("")
        yield
        self._done += 1

    def watch(self, records: Sequence[Record]) -> None:
        """Read a run's new records; tell of each validation."""
        for record in records:
            self._step = int(record["step"])
            if record["kind"] == "validation":
                self._tell(f": step {self._step}, accuracy {record.get(HELD_OUT_ACCURACY.name, float('nan')):.3f}")

    def _tell(self, what: str) -> None:
        total, spent = sum(self.steps), time.monotonic() - self._began
        done = sum(self.steps[: self._done]) + self._step
        left = f"; {span(spent * (total - done) / done)} left" if done else ""
        self.say(f"{self._label} (run {self._done + 1} of {len(self.steps)}){what}{left}")
