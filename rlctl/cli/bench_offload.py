"""Options of `rlctl bench offload`."""

from typing import Annotated

import typer

from rlctl.cli.bench import Plot, TrainedModel, run_bench
from rlctl.cli.output import examples

EPILOG = examples(
    "rlctl bench offload",
    "rlctl bench offload --model qwen3-8b --set trainer.activation_checkpointing=true",
    "rlctl bench offload --model qwen3-1.7b --backend megatron --json",
)


def offload(
    model: TrainedModel = None,
    backend: Annotated[str, typer.Option(help="What trains: fsdp or megatron.")] = "fsdp",
    seq_len: Annotated[
        int | None, typer.Option(min=3, help="Tokens of every sequence. Default: 4096, on CPU 128.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 8,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one pass.")] = 16384,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps of each kind, after the first.")] = 5,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of the trainer section; again for more.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of the tables.")] = False,
    plot: Plot = None,
) -> None:
    """Time optimizer state on its way to the host and back, alone and beside a step, on one device."""
    from rlctl.bench.offload import OffloadBench
    from rlctl.telemetry.devices import count_gpus

    gpus = count_gpus()
    bench = OffloadBench(
        model=model or ("qwen3-1.7b" if gpus else "tiny"),
        backend=backend,
        settings=[f"trainer.micro_batch_tokens={micro_batch_tokens}", *(override or [])],
        tokens=seq_len or (4096 if gpus else 128),
        batch=batch,
        steps=steps,
        device="cuda:0" if gpus else "cpu",
    )
    run_bench(bench, as_json, plot)
