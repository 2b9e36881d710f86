"""Options of `rlctl bench sft`."""

from typing import Annotated

import typer

from rlctl.cli.bench import AsJson, Plot, RunSettings, TrainedModel, run_bench
from rlctl.cli.output import examples

EPILOG = examples(
    "rlctl bench sft",
    "rlctl bench sft --model qwen3-1.7b --seq-len 4096 --modes eager,compiled,compiled-graph --plot sft.png",
    "rlctl bench sft --model qwen3-8b --ranks 4 --modes eager,megatron,megatron-tp2,megatron-tp2-pp2 --json",
)


def sft(
    model: TrainedModel = None,
    ranks: Annotated[int, typer.Option(min=1, help="Trainer ranks.")] = 1,
    seq_len: Annotated[
        int | None, typer.Option(min=3, help="Tokens of every sample. Default: 4096, on CPU 128.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples a step. Default: 8 a rank.")] = None,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens a rank packs into one pass.")] = 16384,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps of every run, after the first.")] = 10,
    modes: Annotated[
        str | None,
        typer.Option(
            help="Of eager, eager-graph, compiled, compiled-graph (by FSDP2; default: all, on CPU those that are "
            "eager), megatron-tp2 and the like."
        ),
    ] = None,
    override: RunSettings = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Time a training step, eager and compiled, by ordinary calls and through a compiled graph, and say what costs."""
    from rlctl.bench.sft import MODES, SftBench
    from rlctl.telemetry.devices import count_gpus

    gpus = count_gpus()
    usual = list(MODES) if gpus else ["eager", "eager-graph"]
    bench = SftBench(
        model=model or ("qwen3-1.7b" if gpus else "tiny"),
        gpus=gpus,
        ranks=ranks,
        tokens=seq_len or (4096 if gpus else 128),
        batch=batch or 8 * ranks,
        micro_batch=micro_batch_tokens,
        steps=steps,
        modes=modes.split(",") if modes else usual,
        extra=override or [],
    )
    run_bench(bench, as_json, plot)
