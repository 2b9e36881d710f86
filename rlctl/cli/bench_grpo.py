"""Options of `rlctl bench grpo`."""

from typing import Annotated

import typer

from rlctl.bench.frame import words
from rlctl.cli.bench import AsJson, Plot, RunSettings, TrainedModel, run_bench
from rlctl.cli.output import examples
from rlctl.config.errors import Problem

EPILOG = examples(
    "rlctl bench grpo",
    "rlctl bench grpo --model qwen3-1.7b --gpus 4 --trainers 2 --age 2 --plot grpo.png",
    "rlctl bench grpo --modes apart,in-flight --lengths 2000,1.0,16384 --json",
)


def grpo(
    model: TrainedModel = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="Devices of every run. Default: all.")] = None,
    trainers: Annotated[
        int | None, typer.Option(min=1, help="Of them trainer ranks, when apart. Default: half.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts a step.")] = 16,
    generations: Annotated[int, typer.Option(min=2, help="Rollouts a prompt.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps of every run, after some that are not.")] = 6,
    age: Annotated[int, typer.Option(min=1, help="max_trajectory_age_steps of the run in flight.")] = 2,
    lengths: Annotated[
        str | None,
        typer.Option(help="Mean, sigma and cap of the log-normal lengths. Default: 600,1.0,4096, on CPU 32,1.0,192."),
    ] = None,
    modes: Annotated[
        str | None, typer.Option(help="Of colocated, apart, drained, in-flight. Default: all that differ here.")
    ] = None,
    override: RunSettings = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Time the same GRPO work synchronous and asynchronous, on as many devices, and say what each side waited for."""
    from rlctl.bench.grpo import MODES, GrpoBench
    from rlctl.telemetry.devices import count_gpus

    problems: list[Problem] = []
    installed = count_gpus()
    gpus = installed if gpus is None else gpus
    # With one device, or none, nothing can stand apart that was colocated.
    usual = ",".join(MODES) if gpus > 1 else "colocated,drained,in-flight"
    bench = GrpoBench(
        model=model or ("qwen3-1.7b" if gpus else "tiny"),
        installed=installed,
        gpus=gpus,
        trainers=trainers or max(1, gpus // 2),
        prompts=prompts,
        generations=generations,
        steps=steps,
        age=age,
        lengths=_lengths(lengths or ("600,1.0,4096" if gpus else "32,1.0,192"), problems),
        modes=words("--modes", modes or usual, MODES, problems),
        extra=override or [],
    )
    run_bench(bench, as_json, plot, problems)


def _lengths(given: str, problems: list[Problem]) -> tuple[float, float, int]:
    try:
        mean, sigma, cap = (float(part) for part in given.split(","))
        if min(mean, sigma, cap) > 0 and cap == int(cap):
            return mean, sigma, int(cap)
    except ValueError:
        pass
    problems.append(Problem("--lengths", "", f"{given!r}: mean, sigma and cap above 0, like 600,1.0,4096"))
    return 1.0, 1.0, 1
