"""`rlctl bench sequences`: GRPO's training step at several lengths of its sequences, with the settings chosen for each.

Each length is a fresh process with one trainer rank, as in a run on one device: packs, recomputation and the compiler
are chosen as by `--dry-run`. Weights, tokens and advantages are random. A row trains as many whole sequences as the
tokens of a step hold, at least one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rlctl.bench.charts import Bar, BarChart
from rlctl.bench.frame import Bench, Cells, Line, Results, ResultTable, Say, until_interrupted
from rlctl.bench.steps import in_process, random_batch, seconds_of
from rlctl.bench.workload import grpo_run, longest, make_random_model, model_problems, shape_folder
from rlctl.config.errors import ConfigError, Problem
from rlctl.dashboard.formats import count
from rlctl.models.facts import find_facts
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.memory import trainer_bytes
from rlctl.preflight.settled import SettledGrpo
from rlctl.telemetry.throughput import TrainingFlops
from rlctl.utils.devices import device_memory

# Prompt of a sequence; the rest is sampled.
_PROMPT = 8
_LEGEND = (
    "pack: most tokens of one pass; recompute: activations are computed again in the backward pass; step: seconds, "
    "median of those after the first; tok/s: trained tokens; MFU: tok/s x (6 N + 12 L H T) / the device's bf16 peak "
    "(PaLM, arXiv 2204.02311, appendix B), with 4 N where weights are frozen (lora); recomputed activations do not "
    "count; peak: most device memory allocated; forecast: what preflight expects of the trainer"
)


@dataclass(frozen=True)
class SequencesBench(Bench):
    """Training steps, a row for each length."""

    model: str
    lengths: tuple[int, ...]  # tokens of a sequence
    tokens: int  # of a step; at least one sequence
    steps: int  # counted ones, after the first
    extra: list[str]  # overrides of the GRPO config
    device: str  # as torch names it

    def check(self) -> list[Problem]:
        if unknown := model_problems(self.model):
            return unknown
        most, problems = longest(self.model), list[Problem]()
        for length in self.lengths:
            if not _PROMPT < length <= most:
                what = f"{length}: from {_PROMPT + 1} to {most}, the model's longest sequence"
                problems.append(Problem("--lengths", "", what))
        for key in (each.partition("=")[0] for each in self.extra):
            if not key.startswith(("trainer.", "grpo.", "lora")) or key == "trainer.num_ranks":
                problems.append(
                    Problem("--set", "", f"{key}: keys of trainer, grpo and lora, on one rank, are what can change")
                )
        return problems

    def measure(self, folder: Path, say: Say) -> "SequencesResults":
        shape = shape_folder(self.model, folder)
        # Mistakes are reported before weights are made, which takes minutes.
        plans = {length: self._write_plan(shape, length) for length in self.lengths}
        say(f"random weights in the shape of {self.model}")
        make_random_model(shape, folder)

        failed: list[str] = []

        def measured() -> Iterator[SequenceRow]:
            for length, plan in plans.items():
                say(f"{self.steps + 1} steps of sequences of {count(length, 'token')}")
                try:
                    yield in_process(measure_steps, self, plan, length, folder)
                except RuntimeError as error:
                    # One that runs out of memory leaves the others.
                    failed.append(f"sequences of {length:,} tokens: {error}")

        rows, interrupted = until_interrupted(measured())
        if not rows:
            raise RuntimeError("; ".join(failed))
        return SequencesResults(self.model, self.tokens, rows, failed, interrupted)

    def _write_plan(self, shape: Path, length: int) -> SettledGrpo:
        """Write data; return a run with sequences of that length, settled for the device. Raises ConfigError."""
        (shape / "train.jsonl").write_text('{"prompt": "w3", "answer": ""}\n')
        lengths = (f"data.max_prompt_length={_PROMPT}", f"generation.max_new_tokens={length - _PROMPT}")
        data = (f"data.train.path={shape / 'train.jsonl'}", "data.train.prompt_key=prompt", "rewards=[{name: exact}]")
        # The tiny recipe's rate would move a model so far in a few steps that clipping leaves hardly any gradient.
        model = (f"model.path={shape}", "model.random_init=true", "trainer.optimizer.lr=1.0e-6")
        machine = RunMachine("cpu" if self.device == "cpu" else "cuda", device_memory())
        settled = grpo_run([*model, *data, *lengths], self.extra).on(machine, read_sizes(shape / "config.json"))
        if length > settled.trainer.micro_batch_tokens:
            what = f"{settled.trainer.micro_batch_tokens}: sequences of {length} tokens (--lengths) do not fit a pass"
            raise ConfigError([Problem("trainer.micro_batch_tokens", "", what)])
        return settled


@dataclass(frozen=True)
class SequenceRow:
    """Training steps of sequences of one length."""

    length: int  # tokens
    sequences: int  # a step
    pack: int  # trainer.micro_batch_tokens
    recompute: bool
    step: float  # seconds, median of the counted ones
    first: float  # seconds of the first one, which compiles
    rate: float  # tokens/s
    mfu: float | None  # None where the device's peak is not known
    mfu_6n: float | None  # None without adapters too
    peak: float  # most bytes of the device allocated in a counted step; 0 on a CPU
    forecast: float  # bytes that preflight expects of the trainer
    losses: list[float]  # of each step


def measure_steps(bench: SequencesBench, settled: SettledGrpo, length: int, folder: Path) -> SequenceRow:
    """Time GRPO updates of a one-rank trainer in this process; the first one compiles and is not counted."""
    import torch

    from rlctl.grpo.losses.base import make_loss
    from rlctl.training.interface import Totals
    from rlctl.training.spec import TrainerSpec
    from rlctl.training.worker import TrainerWorker
    from rlctl.utils.code_cache import keep_code

    model, batch, cpu = folder / "model", max(1, bench.tokens // length), bench.device == "cpu"
    if not cpu:
        keep_code(engine=False)
    section, loss = settled.trainer, make_loss(settled)
    meeting = f"file://{folder / f'{length}.meeting'}"
    spec = TrainerSpec(section, str(model), str(model), 0, 1, meeting, bench.device, 1.0, 1 + bench.steps, 0, None, {})
    trainer = TrainerWorker(spec)
    columns = ("advantage", "rollout_log_prob", "proximal_log_prob", "reference_log_prob")
    share = random_batch(model, length, batch, section.micro_batch_tokens, columns)
    totals = Totals((length - 1) * batch, batch, batch)
    seconds, losses = [], []
    for step in range(1 + bench.steps):
        if step == 1 and not cpu:
            torch.cuda.reset_peak_memory_stats()
        seconds.append(seconds_of(lambda: losses.append(trainer.train(share, loss, totals)["loss/policy"])))
    facts, derived = trainer.info(), find_facts(model)
    rate = length * batch / median(seconds[1:])
    flops = TrainingFlops(facts["active_parameters"], derived.attention, facts["adapter_parameters"])
    used = flops.metrics(rate, length, facts["device_name"])
    return SequenceRow(
        length=length,
        sequences=batch,
        pack=section.micro_batch_tokens,
        recompute=section.activation_checkpointing,
        step=median(seconds[1:]),
        first=seconds[0],
        rate=rate,
        mfu=used.get("throughput/mfu"),
        mfu_6n=used.get("throughput/mfu_6n"),
        peak=trainer.memory()["device_peak"],
        forecast=sum(trainer_bytes(section, derived.sizes, settled.device, settled.copied_roles).values()),
        losses=losses,
    )


@dataclass(frozen=True)
class SequencesResults(Results):
    """Rows of all lengths."""

    model: str
    tokens: int
    rows: list[SequenceRow]
    failed: list[str]  # lengths that were not measured, with the reason
    interrupted: bool = False

    def errors(self) -> list[str]:
        return self.failed

    def report(self, wide: bool) -> list[Line | ResultTable]:
        head = f"{self.model}, GRPO updates of about {self.tokens:,} tokens on one device"
        return [Line(head), ResultTable([_cells(row) for row in self.rows]), Line(_LEGEND, "dim")]

    def chart(self) -> BarChart:
        bars = [Bar(f"{row.length:,} tokens", row.rate, _said(row), True) for row in self.rows]
        return BarChart(f"GRPO's training step, {self.model}", "tokens/s trained, by length of a sequence", bars)


def _said(row: SequenceRow) -> str:
    return f"{row.rate:,.0f}" + ("" if row.mfu is None else f", {row.mfu:.0%} MFU")


def _cells(row: SequenceRow) -> Cells:
    cells: list[tuple[str, Any]] = [
        ("tokens", f"{row.length:,}"),
        ("a step", f"{row.sequences}"),
        ("pack", f"{row.pack:,}"),
        ("recompute", "yes" if row.recompute else "no"),
        ("step", f"{row.step:.3f}"),
        ("tok/s", f"{row.rate:,.0f}"),
        ("MFU", "" if row.mfu is None else f"{row.mfu:.1%}"),
        *([] if row.mfu_6n is None else [("MFU, 6 N", f"{row.mfu_6n:.1%}")]),
        ("peak GiB", f"{row.peak / 2**30:.1f}" if row.peak else ""),
        ("forecast", f"{row.forecast / 2**30:.1f}"),
    ]
    return cells
