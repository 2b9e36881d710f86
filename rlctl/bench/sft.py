"""`rlctl bench sft`: a training step by `rlctl train sft` itself, eager and compiled, by ordinary calls and by a graph.

Random weights of a real shape, samples of one length, so that every step is the same work.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rlctl.bench.frame import Bar, Bench, Cells, Chart, Line, Results, ResultTable, Say, plural
from rlctl.bench.runs import prepare_runs, run_folder, run_training
from rlctl.bench.workload import longest, make_samples, model_problems
from rlctl.config.errors import Problem, did_you_mean
from rlctl.training.profile import Cost

_COMPILE, _GRAPH = "trainer.compile=true", "ray_compiled_graph.enabled=require"
MODES = {
    "eager": (),
    "eager-graph": (_GRAPH,),
    "compiled": (_COMPILE,),
    "compiled-graph": (_COMPILE, _GRAPH),
}
_MEGATRON = re.compile(r"megatron((?:-(?:tp|pp|cp|ep)\d+)*)(-compiled)?(-graph)?")
_MEGATRON_FORM = "megatron[-tpN][-ppN][-cpN][-epN][-compiled][-graph]"
_SIZES = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
_EPOCH = 64
# Updates that are profiled, after the counted ones.
_PROFILED = 2
_LEGEND = (
    "first: seconds of the first step; step: median of those after it; tok/s/dev: trained tokens over the seconds of "
    "the update; MFU: tok/s/dev x (6 N + 12 L H T) / the device's bf16 peak (PaLM, arXiv 2204.02311, appendix B); "
    "busy: share of an update in which the device worked; graph: ranks called through a compiled graph, after a warm-up"
)
_COSTS_SHOWN = 8


def mode_settings(mode: str) -> tuple[str, ...] | None:
    """Return what a mode sets, None for an unknown one. `megatron-tp2-pp2-compiled`: Megatron-core, shared out so."""
    if mode in MODES:
        return MODES[mode]
    found = _MEGATRON.fullmatch(mode)
    if found is None:
        return None
    sizes = re.findall(r"([a-z]+)(\d+)", found[1])
    shared = (f"trainer.megatron.{_SIZES[name]}_parallel_size={size}" for name, size in sizes)
    return ("trainer.backend=megatron", *shared, *[_COMPILE] * bool(found[2]), *[_GRAPH] * bool(found[3]))


@dataclass(frozen=True)
class SftBench(Bench):
    """Training steps of the same work, a row for each mode.

    gpus: of this machine. tokens: of a sample. batch: samples a step. micro_batch: tokens a rank packs into one pass.
    steps: counted ones, after the first. extra: overrides for every run.
    """

    model: str
    gpus: int
    ranks: int
    tokens: int
    batch: int
    micro_batch: int
    steps: int
    modes: list[str]
    extra: list[str]

    def check(self) -> list[Problem]:
        """Return what does not fit this machine or the model, and modes that there are not."""
        problems = []
        if self.ranks > self.gpus > 0:
            problems.append(Problem("--ranks", "", f"{self.ranks}: this machine has {self.gpus} GPUs"))
        if self.batch < self.ranks:
            what = f"{self.batch}: at least one sample for each of the {self.ranks} ranks"
            problems.append(Problem("--batch", "", what))
        for mode in self.modes:
            if mode_settings(mode) is None:
                what = f"{mode}: allowed are {', '.join(MODES)}, {_MEGATRON_FORM}{did_you_mean(mode, MODES)}"
                problems.append(Problem("--modes", "", what))
        if unknown := model_problems(self.model):
            problems += unknown
        elif self.tokens > (most := longest(self.model)):
            problems.append(Problem("--seq-len", "", f"{self.tokens}: the model's longest sequence is {most}"))
        return problems

    def measure(self, folder: Path, say: Say) -> "SftResults":
        """Run every mode, one after the other."""
        make_samples(folder, max(_EPOCH, self.batch), self.tokens)
        settings = {mode: self._settings(mode) for mode in self.modes}
        prepare_runs("sft", self.model, settings, folder, say)
        rows = []
        for mode, own in settings.items():
            say(f"{mode}: {self.steps + 1} steps, all but the first counted")
            steps = run_training("sft", mode, own, folder)[: 1 + self.steps]
            profile = json.loads((run_folder(folder, mode) / "profile" / "trainer-0.json").read_text())
            rows.append(_row(mode, steps, profile))
        return SftResults(self.model, self.ranks, self.tokens, self.batch, rows)

    def _settings(self, mode: str) -> list[str]:
        counted = 1 + self.steps
        return [
            *(f"sft.num_steps={counted + _PROFILED}", f"sft.batch_size={self.batch}"),
            *(f"trainer.num_ranks={self.ranks}", f"trainer.micro_batch_tokens={self.micro_batch}"),
            f"telemetry.profile_updates=[{counted + 1}, {counted + _PROFILED}]",
            *(*(mode_settings(mode) or ()), *self.extra),
        ]


@dataclass(frozen=True)
class SftRow:
    """One mode. first: seconds of the first step. step: median of the counted ones after it.

    rate: tokens/s/device of the counted steps. mfu: None where the device's peak is not known. busy: share of the time
    in which the device worked, in the profiled updates; costs: their dearest operations on rank 0.
    """

    mode: str
    first: float
    step: float
    rate: float
    mfu: float | None
    busy: float
    costs: list[Cost]


def _row(mode: str, steps: list[dict[str, Any]], profile: dict[str, Any]) -> SftRow:
    times = [float(step["time/train"]) for step in steps]
    used = [float(step["throughput/mfu"]) for step in steps[1:] if "throughput/mfu" in step]
    return SftRow(
        mode=mode,
        first=times[0],
        step=median(times[1:]),
        rate=median(float(step["throughput/training"]) for step in steps[1:]),
        mfu=median(used) if used else None,
        busy=profile["busy"],
        costs=[Cost(**cost) for cost in profile["costs"]],
    )


@dataclass(frozen=True)
class SftResults(Results):
    """Rows of all modes."""

    model: str
    ranks: int
    tokens: int
    batch: int
    rows: list[SftRow]

    def speedup(self, row: SftRow) -> float:
        """Return the row's rate against the first row's."""
        return row.rate / self.rows[0].rate

    def derived(self, row: SftRow) -> dict[str, Any]:
        return {"speedup": self.speedup(row)}

    def report(self, wide: bool) -> list[Line | ResultTable]:
        """Return the table, and below it where the time of the last row's update went."""
        work = f"{self.batch} samples of {self.tokens:,} tokens a step"
        last = self.rows[-1]
        return [
            Line(f"{self.model} on {plural(self.ranks, 'rank')}: {work}"),
            ResultTable([self._cells(row) for row in self.rows]),
            Line(f"where {last.mode} spends it (operations by their own time on the device):"),
            *(Line(f"  {cost.share:5.1%}  {cost.name}", cut=True) for cost in last.costs[:_COSTS_SHOWN]),
            Line(_LEGEND, "dim"),
        ]

    def chart(self) -> Chart:
        mfu = {row.mode: "" if row.mfu is None else f", {row.mfu:.0%} MFU" for row in self.rows}
        bars = [Bar(row.mode, row.rate, f"{row.rate:,.0f}{mfu[row.mode]}", "compiled" in row.mode) for row in self.rows]
        title = f"SFT, {self.model}, {plural(self.ranks, 'rank')}, samples of {self.tokens} tokens"
        return Chart(title, "tokens/s/device trained", bars)

    def _cells(self, row: SftRow) -> Cells:
        return [
            ("run", row.mode),
            ("first", f"{row.first:.3f}"),
            ("step", f"{row.step:.3f}"),
            ("tok/s/dev", f"{row.rate:,.0f}"),
            ("MFU", "" if row.mfu is None else f"{row.mfu:.1%}"),
            ("x first", f"{self.speedup(row):.2f}"),
            ("busy", f"{row.busy:.0%}"),
        ]
