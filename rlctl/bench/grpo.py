"""`rlctl bench grpo`: compares runs of `rlctl train grpo` that do the same work in different modes.

A mode says if trainer and engines share devices, and if the run is synchronous. Weights are random. Answers end at
drawn lengths (log-normal, with a long tail) instead of stop tokens, so the work is like that of a real run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from rlctl.bench.frame import Bench, Cells, Line, Results, ResultTable, Say, until_interrupted
from rlctl.bench.runs import run_all
from rlctl.bench.workload import make_prompts, model_problems
from rlctl.config.errors import Problem
from rlctl.grpo.metric_rows import AGE, DECODE_STEP, GENERATED_TOKENS, GENERATOR_SEQUENCES, PROMPT_TOKENS
from rlctl.refit.protocol import REFIT_REST, REFIT_SECONDS, REFIT_STALL, REFIT_WAKE
from rlctl.telemetry.clock import STEP_SECONDS, TRAIN_SECONDS
from rlctl.telemetry.throughput import EFFECTIVE, GENERATION, GENERATOR_IDLE, GENERATOR_IN_REFIT, TRAINER_IDLE, TRAINING

# Modes of a run: name of the option -> name shown.
MODES = {
    "colocated": "sync, colocated",
    "apart": "sync, apart",
    "drained": "async, drained",
    "in-flight": "async, in flight",
}
_MODES_LEGEND = (
    "step: seconds; tok/s/dev: prompt and answer tokens over wall time and all devices; share: of the ceiling; idle: "
    "share of the step; refit: share of the step in which a weight update kept engines from sampling; stall: longest "
    "gap between two tokens of a running request, ms; age: mean steps; seqs: sequences that an engine decodes at a "
    "time; ms/tok: of one token of each"
)
_WAITS_SHOWN = 3


@dataclass(frozen=True)
class GrpoBench(Bench):
    """GRPO runs of the same work, a row for each mode."""

    model: str
    installed: int  # GPUs of this machine
    gpus: int  # GPUs of every run, 0 for CPU
    trainers: int  # trainer ranks, in the modes where trainer and engines have separate devices
    prompts: int  # of a step
    generations: int  # rollouts of a prompt
    steps: int  # counted ones
    age: int  # max_trajectory_age_steps of the mode in-flight
    lengths: tuple[float, float, int]  # mean, sigma and cap of the answers' lengths, in tokens
    modes: list[str]
    extra: list[str]  # overrides for every run

    def check(self) -> list[Problem]:
        problems = []
        if self.gpus > self.installed:
            problems.append(Problem("--gpus", "", f"{self.gpus}: this machine has {self.installed}"))
        if self.trainers >= self.gpus > 1:
            message = f"{self.trainers} of {self.gpus} leave no device for engines"
            problems.append(Problem("--trainers", "", message))
        apart = [mode for mode in self.modes if mode != "colocated"]
        if self.gpus == 1 and apart:
            message = f"{', '.join(apart)}: needs a device for each side, and a run has 1 (--gpus); allowed: colocated"
            problems.append(Problem("--modes", "", message))
        return problems + model_problems(self.model)

    def measure(self, folder: Path, say: Say) -> "GrpoResults":
        make_prompts(folder, 64 * self.prompts)
        settings = {MODES[mode]: self.settings(mode, folder) for mode in self.modes}
        counted_steps = {MODES[mode]: self.counted_steps(mode)[0] for mode in self.modes}
        runs = run_all("grpo", self.model, settings, folder, say)
        named_steps, interrupted = until_interrupted(runs)
        records = {name: steps[counted_steps[name]] for name, steps in named_steps}
        rows = [_mode_row(name, steps) for name, steps in records.items()]
        return GrpoResults(
            model=self.model,
            gpus=self.gpus,
            trainers=self.trainers,
            rows=rows,
            ceiling=_ceiling(rows, list(records.values())) if self.gpus else None,
            interrupted=interrupted,
        )

    def counted_steps(self, mode: str) -> tuple[slice, int]:
        """Return (steps that are counted, number of all steps) of a run in this mode.

        The first step is not counted, because it compiles and fills caches. An asynchronous run also fills its buffer
        at first, and it has nothing left to sample in its last `age` steps.
        """
        if not MODES[mode].startswith("async"):
            return slice(1, 1 + self.steps), 1 + self.steps
        first = 2 + self.age
        return slice(first, first + self.steps), first + self.steps + self.age

    def settings(self, mode: str, folder: Path) -> list[str]:
        """Return the overrides of the run in a mode. folder: where `make_prompts` has written data and reward."""
        mean, sigma, cap = self.lengths
        shared = max(1, self.gpus)
        _, num_steps = self.counted_steps(mode)
        colocated = [f"trainer.num_ranks={shared}", f"generation.num_engines={shared}"]
        apart = [
            f"trainer.num_ranks={self.trainers}",
            f"generation.num_engines={max(1, self.gpus - self.trainers)}",
            "placement.colocated=false",
        ]
        mode_settings = {
            "colocated": colocated,
            "apart": apart,
            "drained": [*apart, "async.enabled=true", "async.in_flight_weight_updates=false"],
            "in-flight": [*apart, "async.enabled=true", f"async.max_trajectory_age_steps={self.age}"],
        }
        common = [
            f"rewards=[{{name: '{folder / 'reward.py'}:score'}}]",
            "data.train.prompt_key=prompt",
            "run.probe=false",
            "data.max_prompt_length=128",
            # The tiny recipe's learning rate is too high for a large random model: ratios to the sampled log-probs
            # would explode.
            "trainer.optimizer.lr=1.0e-6",
            f"grpo.num_steps={num_steps}",
            f"grpo.num_prompts_per_step={self.prompts}",
            f"grpo.num_generations_per_prompt={self.generations}",
            f"generation.max_new_tokens={cap}",
            f"generation.forced_lengths=[{mean}, {sigma}]",
        ]
        return common + mode_settings[mode] + self.extra


@dataclass(frozen=True)
class ModeRow:
    """Results of one mode: means over its counted steps. Rates in tokens/s/device, times in seconds, shares 0 to 1."""

    mode: str
    step: float  # time of a step
    effective: float  # end-to-end rate: prompt and answer tokens
    training: float  # rate of training alone
    generation: float  # rate of generation alone
    idle: dict[str, float]  # phase outside training -> share of the step
    trainer_idle: float  # share of the step
    generator_idle: float  # share of the step
    paused: float  # share of the step in which a refit kept engines from sampling
    stall: float  # longest gap between two tokens of a running request
    refit: float  # time of a refit
    rest: float  # colocated only: time until the trainer has freed its device memory
    wake: float  # colocated only: time until the engines have allocated theirs
    age: float  # mean age of groups, in steps
    sequences: float  # asynchronous only: sequences that an engine decoded at a time
    decode_step: float  # asynchronous only: time of an engine's decode step, one token of each sequence


@dataclass(frozen=True)
class GrpoResults(Results):
    """Results: a row for each mode, and the ceiling of their rates."""

    model: str
    gpus: int
    trainers: int
    rows: list[ModeRow]
    # Rate in tokens/s/device if no device was ever idle, with the best split of devices. It is the number of tokens
    # over the device-seconds of training plus those of generation, each at the best rate of any row. None on a CPU,
    # where both sides share one device.
    ceiling: float | None
    interrupted: bool = False

    def share(self, row: ModeRow) -> float | None:
        return None if self.ceiling is None else row.effective / self.ceiling

    def speedup(self, row: ModeRow) -> float:
        """Return the row's end-to-end rate divided by the first row's."""
        return row.effective / self.rows[0].effective

    def derived_figures(self, row: ModeRow) -> dict[str, Any]:
        return {"share": self.share(row), "speedup": self.speedup(row)}

    def report(self, wide: bool) -> list[Line | ResultTable]:
        split = f", apart {self.trainers} train" if self.gpus > 1 else ""
        ceiling = f": {self.ceiling:,.0f} tokens/s/device if both sides always worked" if self.ceiling else ""
        table = ResultTable([self._cells(row, wide) for row in self.rows])
        return [Line(f"{self.model} on {self._devices}{split}{ceiling}"), table, Line(_MODES_LEGEND, "dim")]

    @property
    def _devices(self) -> str:
        return f"{self.gpus} GPUs" if self.gpus else "CPU"

    def _cells(self, row: ModeRow, wide: bool) -> Cells:
        share = self.share(row)
        waits = sorted(row.idle.items(), key=lambda pair: -pair[1])[:_WAITS_SHOWN]
        further_cells = [
            ("stall", f"{row.stall * 1e3:.0f}"),
            ("age", f"{row.age:.2f}"),
            ("seqs", f"{row.sequences:.0f}" if row.sequences else ""),
            ("ms/tok", f"{row.decode_step * 1e3:.1f}" if row.decode_step else ""),
            ("trainer waits for", ", ".join(f"{name.removeprefix('idle_')} {share:.0%}" for name, share in waits)),
        ]
        cells = [
            ("run", row.mode),
            ("step", f"{row.step:.2f}"),
            ("tok/s/dev", f"{row.effective:,.0f}"),
            ("x first", f"{self.speedup(row):.2f}"),
            ("share", "" if share is None else f"{share:.0%}"),
            ("trainer idle", f"{row.trainer_idle:.0%}"),
            ("gen idle", f"{row.generator_idle:.0%}"),
            ("refit", f"{row.paused:.1%}" if row.mode.startswith("async") else ""),
        ]
        return cells + further_cells if wide else cells


def _mode_row(mode: str, steps: Sequence[Mapping[str, Any]]) -> ModeRow:
    """Return the results of a mode from the records of its counted steps."""
    wall = sum(float(step[STEP_SECONDS.name]) for step in steps)

    def mean(name: str) -> float:
        """Return the mean over the steps that have the metric; 0 if none has it."""
        return fmean([float(step[name]) for step in steps if name in step] or [0.0])

    def weighted_mean(name: str) -> float:
        """Return the mean over the steps that have the metric, weighted by the steps' times: for rates and shares."""
        measured_steps = [step for step in steps if name in step]
        total = sum(float(step[name]) * float(step[STEP_SECONDS.name]) for step in measured_steps)
        return total / (sum(float(step[STEP_SECONDS.name]) for step in measured_steps) or 1.0)

    times = {name for name in chain.from_iterable(steps) if name.startswith("time/")}
    names = sorted(times - {STEP_SECONDS.name, TRAIN_SECONDS.name})
    idle = {name.removeprefix("time/"): sum(step.get(name, 0.0) for step in steps) / wall for name in names}
    return ModeRow(
        mode=mode,
        step=wall / len(steps),
        effective=weighted_mean(EFFECTIVE.name),
        training=mean(TRAINING.name),
        generation=mean(GENERATION.name),
        idle={name: share for name, share in idle.items() if share >= 0.001},
        trainer_idle=weighted_mean(TRAINER_IDLE.name),
        generator_idle=weighted_mean(GENERATOR_IDLE.name),
        paused=weighted_mean(GENERATOR_IN_REFIT.name),
        stall=mean(REFIT_STALL.name),
        refit=mean(REFIT_SECONDS.name),
        rest=mean(REFIT_REST.name),
        wake=mean(REFIT_WAKE.name),
        age=mean(AGE.name),
        sequences=mean(GENERATOR_SEQUENCES.name),
        decode_step=mean(DECODE_STEP.name),
    )


def _ceiling(rows: Sequence[ModeRow], records: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """Return `GrpoResults.ceiling`. records: for each row its counted steps."""
    training = max(row.training for row in rows)
    generation = max(row.generation for row in rows)
    steps = list(chain.from_iterable(records))
    prompt = sum(float(step[PROMPT_TOKENS.name]) for step in steps)
    generated = sum(float(step[GENERATED_TOKENS.name]) for step in steps)
    trained = sum(float(step["tokens/trained"]) for step in steps)
    return (prompt + generated) / (trained / training + generated / generation)
