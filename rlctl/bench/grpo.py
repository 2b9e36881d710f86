"""`rlctl bench grpo`: the same work in every kind of run, by `rlctl train grpo` itself, and what each made of it.

Answers have drawn lengths with a long tail instead of stop tokens, so that random weights make the work of a real run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rlctl.bench.runs import check_training, run_training
from rlctl.bench.workload import make_prompts, make_random_model, make_tokenizer


@dataclass(frozen=True)
class GrpoBench:
    """What is measured. gpus: devices that every run gets, 0 for CPU. trainers: of them, if engines stand apart.

    mean, sigma, cap: of the answers' lengths in tokens. steps: counted ones. extra: overrides for every run.
    """

    shape: Path
    model: str
    gpus: int
    trainers: int
    prompts: int
    generations: int
    steps: int
    age: int
    mean: float
    sigma: float
    cap: int
    modes: list[str]
    extra: list[str]

    def counted(self, mode: str) -> range:
        """Indices of the counted steps. The first step compiles and fills caches; when asynchronous the buffer must
        come to its ordinary state too, and in the last `age` steps there is nothing more to sample.
        """
        first = 2 + self.age if mode.startswith("async") else 1
        return range(first, first + self.steps)

    def num_steps(self, mode: str) -> int:
        """Of the whole run."""
        return self.counted(mode).stop + (self.age if mode.startswith("async") else 0)

    def overrides(self, mode: str) -> list[str]:
        """What makes a run one of the four."""
        apart = [f"trainer.num_ranks={self.trainers}", f"generation.num_engines={max(1, self.gpus - self.trainers)}"]
        own = [*apart, "placement.colocated=false", "async.enabled=true"]
        return {
            "sync, colocated": [
                f"trainer.num_ranks={max(1, self.gpus)}",
                f"generation.num_engines={max(1, self.gpus)}",
            ],
            "sync, apart": [*apart, "placement.colocated=false"],
            "async, drained": [*own, "async.in_flight_weight_updates=false"],
            "async, in flight": [*own, f"async.max_trajectory_age_steps={self.age}"],
        }[mode]


MODES = ("sync, colocated", "sync, apart", "async, drained", "async, in flight")


@dataclass(frozen=True)
class ModeRow:
    """One kind of run, means over its counted steps. Rates in tokens/s/device, times in seconds, shares 0 to 1.

    idle: of the trainer by what it waited for. stood: share of the generator's time in which weights were changed.
    sequences: that an engine decoded at a time, decode_step: seconds of that; of asynchronous runs.
    """

    mode: str
    step: float
    effective: float
    training: float
    generation: float
    idle: dict[str, float]
    trainer_idle: float
    generator_idle: float
    stood: float
    stall: float
    refit: float
    age: float
    sequences: float
    decode_step: float


@dataclass(frozen=True)
class GrpoResults:
    """rows: in the order measured. ceiling: tokens/s/device if both sides worked all the time, with the devices split
    as they need: the tokens over the device-seconds of their training and of their generation, each at the best rate
    that any row reached. None on CPU, where both sides share one device.
    """

    model: str
    gpus: int
    trainers: int
    rows: list[ModeRow]
    ceiling: float | None

    def share(self, row: ModeRow) -> float | None:
        """Of the ceiling."""
        return None if self.ceiling is None else row.effective / self.ceiling

    def as_json(self) -> dict[str, Any]:
        """Everything, with each row's share of the ceiling and its speed against the first row's."""
        first = self.rows[0]
        more = [{"share": self.share(row), "speedup": row.effective / first.effective} for row in self.rows]
        rows = [asdict(row) | extra for row, extra in zip(self.rows, more)]
        return {**asdict(self), "rows": rows}


def run_grpo_bench(bench: GrpoBench, folder: Path, say: Callable[[str], None]) -> GrpoResults:
    """Run every mode, one after the other, in `folder`.

    Raises ConfigError with everything that is wrong before any weights are made, RuntimeError with the end of a run
    that failed.
    """
    make_tokenizer(bench.shape)
    make_prompts(folder, 64 * bench.prompts)
    say("checking what is asked for")
    check_training("grpo", {mode: _settings(bench, mode, folder) for mode in bench.modes}, bench.shape, folder)
    say(f"random weights in the shape of {bench.model}")
    make_random_model(bench.shape, folder)
    records: dict[str, list[dict[str, Any]]] = {}
    for mode in bench.modes:
        say(f"{mode}: {bench.num_steps(mode)} steps, {bench.steps} of them counted")
        records[mode] = _run(bench, mode, folder)
    rows = [_row(mode, steps) for mode, steps in records.items()]
    ceiling = _ceiling(rows, list(records.values())) if bench.gpus else None
    return GrpoResults(bench.model, bench.gpus, bench.trainers, rows, ceiling)


def _run(bench: GrpoBench, mode: str, folder: Path) -> list[dict[str, Any]]:
    """Step records of one mode, without the first ones."""
    steps = run_training("grpo", mode, _settings(bench, mode, folder), folder)
    counted = bench.counted(mode)
    return steps[counted.start : counted.stop]


def _settings(bench: GrpoBench, mode: str, folder: Path) -> list[str]:
    columns = [f"data.train.{key}" for key in (f"path={folder / 'train.jsonl'}", "prompt_key=prompt")]
    return [
        *(f"model.path={folder / 'model'}", f"rewards=[{{name: '{folder / 'reward.py'}:score'}}]", *columns),
        # The tiny recipe's rate would tear a large random model away from what sampled.
        *("run.probe=false", "data.max_prompt_length=128", "trainer.optimizer.lr=1.0e-6"),
        *(f"grpo.num_steps={bench.num_steps(mode)}", f"grpo.num_prompts_per_step={bench.prompts}"),
        *(f"grpo.num_generations_per_prompt={bench.generations}", f"generation.max_new_tokens={bench.cap}"),
        *(f"generation.forced_lengths=[{bench.mean}, {bench.sigma}]", *bench.overrides(mode), *bench.extra),
    ]


def _row(mode: str, steps: Sequence[Mapping[str, Any]]) -> ModeRow:
    wall = sum(float(step["time/step"]) for step in steps)

    def mean(name: str) -> float:
        return fmean([float(step[name]) for step in steps if name in step] or [0.0])

    def weighted(name: str) -> float:
        known = [(float(step[name]), float(step["time/step"])) for step in steps if name in step]
        return sum(value * seconds for value, seconds in known) / (sum(seconds for _, seconds in known) or 1.0)

    names = sorted({key for step in steps for key in step if key.startswith("time/")} - {"time/step", "time/train"})
    idle = {name.removeprefix("time/"): sum(step.get(name, 0.0) for step in steps) / wall for name in names}
    return ModeRow(
        mode=mode,
        step=wall / len(steps),
        effective=weighted("throughput/effective"),
        training=mean("throughput/training"),
        generation=mean("throughput/generation"),
        idle={name: share for name, share in idle.items() if share >= 0.001},
        trainer_idle=weighted("idle/trainer"),
        generator_idle=weighted("idle/generator"),
        stood=weighted("idle/generator_refit"),
        stall=mean("refit/stall"),
        refit=mean("refit/seconds"),
        age=mean("age/mean"),
        sequences=mean("generator/sequences"),
        decode_step=mean("generator/decode_step"),
    )


def _ceiling(rows: Sequence[ModeRow], records: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    training, generation = max(row.training for row in rows), max(row.generation for row in rows)
    steps = [step for part in records for step in part]
    prompt, generated, trained = (
        sum(float(step[f"tokens/{name}"]) for step in steps) for name in ("prompt", "generated", "trained")
    )
    return (prompt + generated) / (trained / training + generated / generation)
