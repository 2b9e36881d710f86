"""Options of `rlctl bench refit`."""

from typing import Annotated, get_args

import typer

from rlctl.bench.frame import numbers, words
from rlctl.cli.bench import AsJson, Plot, run_bench
from rlctl.cli.output import examples
from rlctl.config.errors import Problem

EPILOG = examples(
    "rlctl bench refit",
    "rlctl bench refit --model qwen3-8b --num-buffers 1,2,3 --plot refit.png",
    "rlctl bench refit --model llama-8b --trainers 2 --generators 2 --mode staged",
    "rlctl bench refit --model path/to/hf-folder --json > refit.json",
)


def refit(
    model: Annotated[
        str | None,
        typer.Option(
            help="A shape by name, or a Hugging Face folder (weights not needed). Default: tiny, on GPU qwen3-8b."
        ),
    ] = None,
    trainers: Annotated[int, typer.Option(min=1, help="Trainer ranks; each holds a share of every tensor.")] = 1,
    generators: Annotated[int, typer.Option(min=1, help="Engines.")] = 1,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices an engine is spread over.")] = 1,
    num_buffers: Annotated[str | None, typer.Option(help="A row for each, like 1,2,3. Default: the configs'.")] = None,
    mode: Annotated[str | None, typer.Option(help="A row for each: direct, staged. On CPU auto.")] = None,
    transport: Annotated[
        str | None, typer.Option(help="A row for each: shm, ipc, broadcast. Default: a run's.")
    ] = None,
    colocated: Annotated[bool, typer.Option("--colocated", help="Trainer and engine share devices.")] = False,
    master: Annotated[str, typer.Option(help="dtype of the trainer's weights: float32 or bfloat16.")] = "float32",
    checksum: Annotated[
        str | None, typer.Option(help="A row for each: all, sampled, off. Default: a run's; on CPU off too.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=2, help="Refits a row, at most 30 of a reference; the first is not counted.")
    ] = 10,
    updates: Annotated[int, typer.Option(min=0, help="Refits a row while requests run, for their stall.")] = 8,
    references: Annotated[bool, typer.Option(help="Measure the other schemes too.")] = True,
    eager: Annotated[bool, typer.Option("--eager", help="Engines without CUDA graphs: they start faster.")] = False,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Time weights from trainer ranks into vLLM's parameters, beside the plain link and other schemes, bit by bit.

    Ends with 1 if any delivered weight differs from the one sent.
    """
    from rlctl.bench.refit import RefitBench
    from rlctl.config.load import load
    from rlctl.refit.messages import Checks, Kind
    from rlctl.telemetry.devices import count_gpus

    problems: list[Problem] = []
    gpus = count_gpus()
    defaults = load("grpo", None, []).config.refit  # type: ignore[union-attr]
    usual_modes, usual_checks = ("direct,staged", "sampled") if gpus else ("auto", "all,off")
    words("--master", master, ("float32", "bfloat16"), problems)
    bench = RefitBench(
        model=model or ("qwen3-8b" if gpus else "tiny"),
        gpus=gpus,
        trainers=trainers,
        engines=generators,
        tensor_parallel=tensor_parallel,
        colocated=colocated or gpus == 1,
        transports=words("--transport", transport, get_args(Kind), problems) if transport else (),
        modes=words("--mode", mode or usual_modes, ("auto", "direct", "staged"), problems),
        num_buffers=numbers("--num-buffers", num_buffers or str(defaults.num_buffers), "1,2,3", problems),
        checks=words("--checksum", checksum or usual_checks, get_args(Checks), problems),
        master=master,
        defaults=defaults,
        rounds=rounds,
        updates=updates,
        references=references,
        enforce_eager=eager,
    )
    run_bench(bench, as_json, plot, problems)
