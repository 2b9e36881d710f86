"""`rlctl bench grpo --advise`: the division of the devices, the bound on age and the lookahead that suit a model.

Costs are measured on one device, or given; every setup is simulated with these costs (`simulation.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rlctl.bench.charts import Bar, BarChart
from rlctl.bench.frame import Bench, Cells, Line, Results, ResultTable, Say, until_interrupted
from rlctl.bench.grpo import GrpoBench
from rlctl.bench.rates import measure_costs
from rlctl.bench.simulation import Costs, Setup, SimulatedMachine, SimulatedRow, simulate
from rlctl.bench.workload import PROMPT_WORDS, make_prompts, model_folder, model_problems
from rlctl.config.builtin import RECIPES
from rlctl.config.errors import Problem
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.load import load
from rlctl.preflight.machine import device_of
from rlctl.utils.devices import device_memory

# Largest bound on age that is tried. Age costs learning, so a gain beyond this bound is not wanted.
MOST_BOUND = 4
_MOST_GPUS = 64
# Rates within this share of the best are as good, and the youngest samples win.
_AS_GOOD = 0.02
# Settings that `Setup.apply` replaces, and settings unknown to a simulation.
_TRIED = (
    "trainer.num_ranks",
    "generation.num_engines",
    "placement.colocated",
    "async.enabled",
    "async.max_trajectory_age_steps",
    "async.prefetch",
)
_UNKNOWN = ("grpo.num_steps", "generation.tensor_parallel_size", "environment", "rollout")
_STEPS = 16
_SHOWN = 24
_LEGEND = (
    "split: trainer ranks + engines; bound: async.max_trajectory_age_steps, 0 is synchronous; step: seconds; "
    "tok/s/dev: prompt and answer tokens over wall time and all devices; x coloc: over the colocated run's; share: of "
    "the ceiling; idle: share of the step; age: mean steps; seqs: sequences that an engine decodes at a time"
)


@dataclass(frozen=True)
class AdviceBench(Bench):
    """Simulation of all setups of some devices."""

    # The run that is measured, on one device: model, work and settings of the simulated ones too.
    work: GrpoBench
    # Devices that are simulated.
    gpus: int
    # None: measured.
    costs: Costs | None

    def check(self) -> list[Problem]:
        problems = model_problems(self.work.model)
        if not 2 <= self.gpus <= _MOST_GPUS:
            what = f"{self.gpus}: with --advise from 2 to {_MOST_GPUS}, which this machine need not have"
            problems.append(Problem("--gpus", "", what))
        for key in (each.partition("=")[0] for each in self.work.extra):
            if key in _TRIED:
                problems.append(Problem("--set", "", f"{key}: --advise tries all of its values"))
            elif key.startswith(_UNKNOWN):
                problems.append(Problem("--set", "", f"{key}: --advise does not simulate it"))
        return problems

    def measure(self, folder: Path, say: Say) -> "AdviceResults":
        make_prompts(folder, 64 * self.work.prompts)
        model = model_folder(self.work.model, folder)
        # A simulation has no use for the model's own tokenizer.
        whose = [f"model.path={model}", "model.random_init=true", f"model.tokenizer={RECIPES / 'tiny/qwen3-tiny'}"]
        config = load("grpo", None, [*self.work.settings("colocated", folder), *whose]).settled.config
        costs = self.costs or measure_costs(self.work, folder, say)
        gpus = self.gpus if self.costs else self.work.gpus
        machine = SimulatedMachine(device_of(gpus), read_sizes(model / "config.json"), device_memory())

        def simulated() -> Iterator[SimulatedRow]:
            said = ""
            for setup in setups(self.gpus):
                if _name(setup) != said:
                    said = _name(setup)
                    say(f"simulating {said}")
                yield simulate(config, setup, costs, machine, PROMPT_WORDS, _STEPS)

        rows, interrupted = until_interrupted(simulated())
        if len(rows) < 2:
            # The colocated run alone advises nothing.
            raise KeyboardInterrupt
        # Among rows of equal speed to three digits, the one with the youngest samples comes first.
        rows.sort(key=lambda row: (-float(f"{row.effective:.3g}"), *_lookahead(row)))
        measured = "" if self.costs else "one GPU of this machine" if self.work.gpus else "this machine's CPU"
        return AdviceResults(self.work.model, self.gpus, measured, self.work.lengths, costs, rows, interrupted)


def setups(gpus: int) -> Iterator[Setup]:
    """Yield every setup of `gpus` devices, at least 2: colocated, then even splits before uneven ones."""
    yield Setup(gpus, gpus, colocated=True)
    for trainers in sorted(range(1, gpus), key=lambda trainers: abs(2 * trainers - gpus)):
        engines = gpus - trainers
        yield Setup(trainers, engines)
        yield Setup(trainers, engines, bound=1)
        # The bound 1 has but one lookahead: one step is trained while another is sampled.
        for bound in range(2, MOST_BOUND + 1):
            for prefetch in ("auto", "full"):
                yield Setup(trainers, engines, bound=bound, prefetch=prefetch)


@dataclass(frozen=True)
class AdviceResults(Results):
    """Rows of all setups, the fastest first, and the advice."""

    model: str
    gpus: int
    # Device of the measured costs; empty if they were given.
    measured: str
    # Mean, sigma and cap of the answers', in tokens.
    lengths: tuple[float, float, int]
    costs: Costs
    rows: list[SimulatedRow]
    interrupted: bool = False

    @property
    def advised(self) -> SimulatedRow:
        """Row with the smallest bound, and then the smallest lookahead, among rows as good as the best."""
        good = [row for row in self.rows if row.effective >= (1 - _AS_GOOD) * self.fastest.effective]
        return min(good, key=lambda row: (*_lookahead(row), -row.effective))

    @property
    def fastest(self) -> SimulatedRow:
        return max(self.rows, key=lambda row: row.effective)

    @property
    def ceiling(self) -> float:
        """Tokens/s/device if both sides always worked, with the devices divided as they need."""
        return self._tokens[0] / sum(self._needs)

    @property
    def most(self) -> tuple[float, SimulatedRow]:
        """Largest share of the ceiling for whole devices, and a row of that split."""
        trainer, engine = self._needs
        fair = (trainer + engine) / self.gpus
        rows = [row for row in self.rows if not row.setup.colocated]
        shares = [fair / max(trainer / row.setup.trainers, engine / row.setup.engines) for row in rows]
        best = max(range(len(rows)), key=shares.__getitem__)
        return shares[best], rows[best]

    @property
    def _needs(self) -> tuple[float, float]:
        """Device-seconds of training and of generation a step, each at the best rate of any row."""
        trained, generated = self._tokens
        training = self.costs.update + trained / self.costs.training
        return training, generated / max(row.generation for row in self.rows)

    @property
    def _tokens(self) -> tuple[float, float]:
        """Tokens of a step: trained ones, and the generated part."""
        return fmean(row.trained for row in self.rows), fmean(row.generated for row in self.rows)

    def share(self, row: SimulatedRow) -> float:
        return row.effective / self.ceiling

    def speedup(self, row: SimulatedRow) -> float:
        """Return the row's rate over the colocated one's."""
        return row.effective / next(row for row in self.rows if row.setup.colocated).effective

    def derived(self, row: SimulatedRow) -> dict[str, Any]:
        return {"share": self.share(row), "speedup": self.speedup(row)}

    def as_json(self) -> Any:
        return super().as_json() | {"ceiling": self.ceiling, "advice": self.advised.setup.overrides}

    def report(self, wide: bool) -> list[Line | ResultTable]:
        shown = self.rows[:_SHOWN]
        # The baseline of all comparisons and the advised run are always there.
        shown += [row for row in self.rows[_SHOWN:] if row.setup.colocated or row is self.advised]
        bold = [index for index, row in enumerate(shown) if row is self.advised]
        table = ResultTable([self._cells(row, wide) for row in shown], bold, 2 if wide else 1)
        hidden = len(self.rows) - len(shown)
        more = [Line(f"{hidden} slower rows are not shown; --json has them", "dim")] if hidden else []
        limits = [Line(text) for text in self._limits()]
        return [*map(Line, self._head()), table, *more, *limits, Line(self._advice(), "bold"), Line(_LEGEND, "dim")]

    def chart(self) -> BarChart:
        bars = []
        for row in self.rows[:_SHOWN]:
            text = f"{row.effective:,.0f}, {self.share(row):.0%}"
            bars.append(Bar(_label(row.setup), row.effective, text, row is self.advised))
        label = "tokens/s/device end to end, simulated; dashed: both sides always at work"
        return BarChart(f"GRPO, {self.model}, {self.gpus} devices", label, bars, self.ceiling)

    def _head(self) -> Iterator[str]:
        mean, sigma, cap = self.lengths
        yield (
            f"{self.model}, answers of {mean:g} tokens (sigma {sigma:g}, at most {cap:,}), simulated on {self.gpus} "
            f"devices: {self.ceiling:,.0f} tokens/s/device if both sides always worked"
        )
        costs = self.costs
        rates = f"{costs.training:.0f},{costs.decode.base * 1e3:.3g},{costs.decode.per_sequence * 1e3:.3g}"
        if self.measured:
            yield f"measured on {self.measured}, and each device is taken to be as fast: --rates {rates}"
        else:
            yield f"as given: --rates {rates}; refits, rewards and the driver take no time"

    def _limits(self) -> Iterator[str]:
        """Yield the limits that keep the rows below the ceiling."""
        share, row = self.most
        if share < 0.97:
            trainer, engine = (each / on for each, on in zip(self._needs, (row.setup.trainers, row.setup.engines)))
            less, more, part = ("trainer", "engines", trainer / engine)
            if part > 1:
                less, more, part = "engines", "trainer", 1 / part
            yield (
                f"{self.gpus} devices apart reach at most {share:.0%} of the ceiling: at {_name(row.setup)} the {less} "
                f"need{'s' if less == 'trainer' else ''} {part:.2f} of the time of the {more}"
            )
        advised, cap = self.advised, self.lengths[2]
        longest = cap * self.costs.decode.step(round(advised.sequences))
        if longest / (advised.setup.bound + 1) > 0.9 * advised.step:
            yield (
                f"the longest answer ({cap:,} tokens) takes {longest:.1f} s, so a step takes at least "
                f"{longest / (advised.setup.bound + 1):.1f} s at bound {advised.setup.bound}: "
                "more prompts a step fill the engines meanwhile"
            )

    def _advice(self) -> str:
        advised, best = self.advised, self.fastest
        gain = best.effective / advised.effective - 1
        older = f"; {_label(best.setup)} is {gain:.1%} faster, on older samples"
        why = f"{self.share(advised):.0%} of the ceiling, {self.speedup(advised):.2f} x colocated"
        of = " of what was simulated" if self.interrupted else ""
        return f"advice{of}: {' '.join(advised.setup.overrides)} ({why}{older if gain >= 0.001 else ''})"

    def _cells(self, row: SimulatedRow, wide: bool) -> Cells:
        setup = row.setup
        return [
            ("split", _name(setup)),
            ("bound", str(setup.bound)),
            ("prefetch", setup.prefetch if setup.bound > 1 else ""),
            ("step", f"{row.step:.2f}"),
            ("tok/s/dev", f"{row.effective:,.0f}"),
            ("x coloc", f"{self.speedup(row):.2f}"),
            ("share", f"{self.share(row):.0%}"),
            ("train idle", f"{row.trainer_idle:.0%}"),
            ("gen idle", f"{row.generator_idle:.0%}"),
            ("age", f"{row.age:.2f}"),
            *([("seqs", f"{row.sequences:.0f}")] if wide else []),
        ]


def _lookahead(row: SimulatedRow) -> tuple[int, bool]:
    """Return a key that sorts rows by the age of their samples, youngest first."""
    return row.setup.bound, row.setup.prefetch == "full"


def _name(setup: Setup) -> str:
    return "colocated" if setup.colocated else f"{setup.trainers} + {setup.engines}"


def _label(setup: Setup) -> str:
    return f"{_name(setup)}, bound {setup.bound}, {setup.prefetch}" if setup.bound else f"{_name(setup)}, synchronous"
