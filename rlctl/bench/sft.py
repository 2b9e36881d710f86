"""`rlctl bench sft`: times steps of `rlctl train sft`: eager and compiled, by ordinary calls and by a compiled graph.

Weights are random, in the shape of a real model. All samples have the same length, so every step does the same work.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rlctl.bench.frame import Bench, Cells, Line, Results, ResultTable, Say, until_interrupted
from rlctl.bench.runs import run_all
from rlctl.bench.workload import longest, make_samples, model_problems
from rlctl.config.errors import Problem, did_you_mean
from rlctl.dashboard.formats import count

_EAGER = "trainer.compile=false"
_COMPILE = "trainer.compile=true"
_GRAPH = "ray_compiled_graph.enabled=require"
MODES = {
    "eager": (_EAGER,),
    "eager-graph": (_EAGER, _GRAPH),
    "compiled": (_COMPILE,),
    "compiled-graph": (_COMPILE, _GRAPH),
}
_MEGATRON = re.compile(r"megatron((?:-(?:tp|pp|cp|ep)\d+)*)(-compiled)?(-graph)?")
_MEGATRON_FORM = "megatron[-tpN][-ppN][-cpN][-epN][-compiled][-graph]"
_SIZES = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
_EPOCH = 64
_LEGEND = (
    "first: seconds of the first step; step: median of those after it; tok/s/dev: trained tokens over the seconds of "
    "the update; MFU: tok/s/dev x (6 N + 12 L H T) / the device's bf16 peak (PaLM, arXiv 2204.02311, appendix B); "
    "graph: ranks called through a compiled graph, after a warm-up"
)


def mode_settings(mode: str) -> tuple[str, ...] | None:
    """Return the overrides of a mode such as eager or megatron-tp2-pp2-compiled; None for an unknown one."""
    if mode in MODES:
        return MODES[mode]
    match = _MEGATRON.fullmatch(mode)
    if match is None:
        return None
    settings = ["trainer.backend=megatron"]
    for name, size in re.findall(r"([a-z]+)(\d+)", match[1]):
        settings.append(f"trainer.megatron.{_SIZES[name]}_parallel_size={size}")
    settings.append(_COMPILE if match[2] else _EAGER)
    if match[3]:
        settings.append(_GRAPH)
    return tuple(settings)


@dataclass(frozen=True)
class SftBench(Bench):
    """Training steps of the same work, a row for each mode."""

    model: str
    gpus: int  # of this machine
    ranks: int
    tokens: int  # of a sample
    batch: int  # samples of a step
    micro_batch: int  # tokens that a rank packs into one pass
    steps: int  # counted ones, after the first
    modes: list[str]
    extra: list[str]  # overrides for every run

    def check(self) -> list[Problem]:
        problems = []
        if self.ranks > self.gpus > 0:
            problems.append(Problem("--ranks", "", f"{self.ranks}: this machine has {self.gpus} GPUs"))
        if self.batch < self.ranks:
            message = f"{self.batch}: at least one sample for each of the {self.ranks} ranks"
            problems.append(Problem("--batch", "", message))
        for mode in self.modes:
            if mode_settings(mode) is None:
                message = f"{mode}: allowed are {', '.join(MODES)}, {_MEGATRON_FORM}{did_you_mean(mode, MODES)}"
                problems.append(Problem("--modes", "", message))
        unknown_model = model_problems(self.model)
        if unknown_model:
            return problems + unknown_model
        limit = longest(self.model)
        if self.tokens > limit:
            problems.append(Problem("--seq-len", "", f"{self.tokens}: the model's longest sequence is {limit}"))
        return problems

    def measure(self, folder: Path, say: Say) -> "SftResults":
        make_samples(folder, max(_EPOCH, self.batch), self.tokens)
        common = [
            f"sft.num_steps={1 + self.steps}",
            f"sft.batch_size={self.batch}",
            f"model.max_length={self.tokens}",
            f"trainer.num_ranks={self.ranks}",
            f"trainer.micro_batch_tokens={self.micro_batch}",
        ]
        settings = {mode: common + list(mode_settings(mode) or ()) + self.extra for mode in self.modes}
        mode_steps, interrupted = until_interrupted(run_all("sft", self.model, settings, folder, say))
        return SftResults(
            model=self.model,
            ranks=self.ranks,
            tokens=self.tokens,
            batch=self.batch,
            rows=[_sft_row(mode, steps) for mode, steps in mode_steps],
            interrupted=interrupted,
        )


@dataclass(frozen=True)
class SftRow:
    """Results of one mode. Times in seconds."""

    mode: str
    first: float  # time of the first step
    step: float  # median time of the later steps
    rate: float  # trained tokens/s/device, median
    mfu: float | None  # model FLOPs utilisation, 0 to 1; None if the device's peak is not known


def _sft_row(mode: str, steps: list[dict[str, Any]]) -> SftRow:
    """Return the results of a mode from the records of its steps."""
    times = [float(step["time/train"]) for step in steps]
    shares = [float(step["throughput/mfu"]) for step in steps[1:] if "throughput/mfu" in step]
    return SftRow(
        mode=mode,
        first=times[0],
        step=median(times[1:]),
        rate=median(float(step["throughput/training"]) for step in steps[1:]),
        mfu=median(shares) if shares else None,
    )


@dataclass(frozen=True)
class SftResults(Results):
    """Results: a row for each mode."""

    model: str
    ranks: int
    tokens: int  # of a sample
    batch: int  # samples of a step
    rows: list[SftRow]
    interrupted: bool = False

    def speedup(self, row: SftRow) -> float:
        """Return the row's rate divided by the first row's."""
        return row.rate / self.rows[0].rate

    def derived_figures(self, row: SftRow) -> dict[str, Any]:
        return {"speedup": self.speedup(row)}

    def report(self, wide: bool) -> list[Line | ResultTable]:
        work = f"{self.batch} samples of {self.tokens:,} tokens a step"

        def cells(row: SftRow) -> Cells:
            return [
                ("run", row.mode),
                ("first", f"{row.first:.3f}"),
                ("step", f"{row.step:.3f}"),
                ("tok/s/dev", f"{row.rate:,.0f}"),
                ("MFU", "" if row.mfu is None else f"{row.mfu:.1%}"),
                ("x first", f"{self.speedup(row):.2f}"),
            ]

        return [
            Line(f"{self.model} on {count(self.ranks, 'rank')}: {work}"),
            ResultTable([cells(row) for row in self.rows]),
            Line(_LEGEND, "dim"),
        ]
