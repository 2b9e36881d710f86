"""`rlctl bench sft`: a training step by `rlctl train sft` itself, eager and compiled, by ordinary calls and by a graph.

Random weights of a real shape, samples of one length, so that every step is the same work.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rlctl.bench.runs import check_training, run_folder, run_training
from rlctl.bench.workload import make_random_model, make_samples, make_tokenizer
from rlctl.training.profile import Cost

_COMPILE, _GRAPH = "trainer.compile=true", "ray_compiled_graph.enabled=require"
MODES = {
    "eager": (),
    "eager-graph": (_GRAPH,),
    "compiled": (_COMPILE,),
    "compiled-graph": (_COMPILE, _GRAPH),
}
_MEGATRON = re.compile(r"megatron((?:-(?:tp|pp|cp|ep)\d+)*)(-compiled)?(-graph)?")
_SIZES = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
_EPOCH = 64
# Updates that are looked at, after the counted ones.
_PROFILED = 2


def mode_settings(mode: str) -> tuple[str, ...] | None:
    """What a mode sets; None for none that there is. `megatron-tp2-pp2-compiled`: Megatron-core, shared out so."""
    if mode in MODES:
        return MODES[mode]
    found = _MEGATRON.fullmatch(mode)
    if found is None:
        return None
    sizes = re.findall(r"([a-z]+)(\d+)", found[1])
    shared = (f"trainer.megatron.{_SIZES[name]}_parallel_size={size}" for name, size in sizes)
    return ("trainer.backend=megatron", *shared, *[_COMPILE] * bool(found[2]), *[_GRAPH] * bool(found[3]))


@dataclass(frozen=True)
class SftBench:
    """What is measured. ranks: trainer ranks. tokens: of a sample. batch: samples a step. micro_batch: tokens a rank
    packs into one pass. steps: counted ones. extra: overrides for every run.
    """

    shape: Path
    model: str
    ranks: int
    tokens: int
    batch: int
    micro_batch: int
    steps: int
    modes: list[str]
    extra: list[str]


@dataclass(frozen=True)
class SftRow:
    """One kind of run. first: seconds of the first step. step: median of the counted ones after it. rate: tokens/s a
    device, of them. mfu: None where the device's peak is not known. busy: share of the time in which the device
    worked, in the updates profiled; costs: their dearest operations on rank 0.
    """

    mode: str
    first: float
    step: float
    rate: float
    mfu: float | None
    busy: float
    costs: list[Cost]


@dataclass(frozen=True)
class SftResults:
    """rows: in the order measured."""

    model: str
    ranks: int
    tokens: int
    batch: int
    rows: list[SftRow]

    def speedup(self, row: SftRow) -> float:
        """Against the first row."""
        return row.rate / self.rows[0].rate

    def as_json(self) -> dict[str, Any]:
        """Everything, with each row's speed against the first row's."""
        return {**asdict(self), "rows": [asdict(row) | {"speedup": self.speedup(row)} for row in self.rows]}


def run_sft_bench(bench: SftBench, folder: Path, say: Callable[[str], None]) -> SftResults:
    """Run every mode, one after the other, in `folder`.

    Raises ConfigError with everything that is wrong before any weights are made, RuntimeError with the end of a run
    that failed.
    """
    make_tokenizer(bench.shape)
    make_samples(folder, max(_EPOCH, bench.batch), bench.tokens)
    say("checking what is asked for")
    check_training("sft", {mode: _settings(bench, mode, folder) for mode in bench.modes}, bench.shape, folder)
    say(f"random weights in the shape of {bench.model}")
    make_random_model(bench.shape, folder)
    rows = []
    for mode in bench.modes:
        say(f"{mode}: {bench.steps + 1} steps, all but the first counted")
        rows.append(_measured(bench, mode, folder))
    return SftResults(bench.model, bench.ranks, bench.tokens, bench.batch, rows)


def _settings(bench: SftBench, mode: str, folder: Path) -> list[str]:
    counted = 1 + bench.steps
    return [
        *(f"model.path={folder / 'model'}", "model.random_init=false", f"data.train.path={folder / 'train.jsonl'}"),
        *(f"sft.num_steps={counted + _PROFILED}", f"sft.batch_size={bench.batch}"),
        *(f"trainer.num_ranks={bench.ranks}", f"trainer.micro_batch_tokens={bench.micro_batch}"),
        f"telemetry.profile_updates=[{counted + 1}, {counted + _PROFILED}]",
        *(*(mode_settings(mode) or ()), *bench.extra),
    ]


def _measured(bench: SftBench, mode: str, folder: Path) -> SftRow:
    steps = run_training("sft", mode, _settings(bench, mode, folder), folder)[: 1 + bench.steps]
    profile = json.loads((run_folder(folder, mode) / "profile" / "trainer-0.json").read_text())
    times = [float(step["time/train"]) for step in steps]
    rates = [float(step["throughput/training"]) for step in steps[1:]]
    used = [float(step["throughput/mfu"]) for step in steps[1:] if "throughput/mfu" in step]
    return SftRow(
        mode=mode,
        first=times[0],
        step=median(times[1:]),
        rate=median(rates),
        mfu=median(used) if used else None,
        busy=profile["busy"],
        costs=[Cost(**cost) for cost in profile["costs"]],
    )
