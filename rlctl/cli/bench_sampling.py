"""Commands of `rlctl bench` that sample without a trainer: turns of engines, and the endpoint of agents."""

from typing import Annotated

import typer

from rlctl.bench.frame import numbers
from rlctl.cli.arguments import AsJson, finite
from rlctl.cli.bench_frame import RunSettings, TrainedModel, run_bench
from rlctl.cli.output import examples
from rlctl.config.errors import Problem
from rlctl.utils.devices import count_gpus

GENERATION_EPILOG = examples(
    "rlctl bench generation",
    "rlctl bench generation --model qwen3-0.6b --tokens 256 --turns 1",
    "rlctl bench generation --prompts 32 --pause 1 --set generation.max_num_seqs=128 --json",
)
AGENTS_EPILOG = examples(
    "rlctl bench agents",
    "rlctl bench agents --bodies 7KB --sessions 64 --no-engine",
    "rlctl bench agents --model qwen3-0.6b --turns 8 --json",
)


def generation(
    model: TrainedModel = None,
    turns: Annotated[str | None, typer.Option(help="A row for each. Default: 1,8; on a CPU 1,4.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Sampled tokens of a rollout, in all turns. Default: 1024; on a CPU 64.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts of a round. Default: 64; on a CPU 4.")] = None,
    generations: Annotated[int, typer.Option(min=2, help="Rollouts of each prompt.")] = 8,
    spread: Annotated[
        float, typer.Option(min=0, max=3, help="Sigma of the log-normal lengths of a rollout's turns; 0: all alike.")
    ] = 0.5,
    pause: Annotated[
        float, typer.Option(min=0, callback=finite, help="Seconds of the environment between two turns.")
    ] = 0.2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each row, after a warm-up.")] = 3,
    override: RunSettings = None,
    as_json: AsJson = False,
) -> None:
    """Time the sampling of engines, in one turn and in several with an environment, against the device's limit."""
    from rlctl.bench.generation import GenerationBench

    gpus, problems = count_gpus(), list[Problem]()
    bench = GenerationBench(
        model=model or ("qwen3-1.7b" if gpus else "tiny"),
        prompts=prompts or (64 if gpus else 4),
        generations=generations,
        tokens=tokens or (1024 if gpus else 64),
        turns=numbers("--turns", turns or ("1,8" if gpus else "1,4"), "1,8", problems),
        spread=spread,
        pause=pause,
        rounds=rounds,
        extra=override or [],
    )
    run_bench(bench, as_json, problems)


def agents(
    model: TrainedModel = None,
    bodies: Annotated[str, typer.Option(help="Sizes of a session's first request, a row for each.")] = "7KB,77KB",
    sessions: Annotated[int, typer.Option(min=1, help="Sessions at one time, in one process.")] = 512,
    engine: Annotated[bool, typer.Option(help="Compare an agent's turns with an environment's on an engine.")] = True,
    turns: Annotated[int | None, typer.Option(min=2, help="Turns of a rollout. Default: 8; on a CPU 4.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Sampled tokens of a rollout, in all turns. Default: 1024; on a CPU 64.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts of a round. Default: 64; on a CPU 4.")] = None,
    pause: Annotated[
        float, typer.Option(min=0, callback=finite, help="Seconds of the partner between two turns.")
    ] = 0.2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each player, after a warm-up.")] = 3,
    override: RunSettings = None,
    as_json: AsJson = False,
) -> None:
    """Time the endpoint of agents, and turns through the openai SDK against the same turns as an environment."""
    from rlctl.bench.agents import AgentsBench
    from rlctl.bench.dispatch import UNITS
    from rlctl.bench.generation import GenerationBench

    gpus, problems = count_gpus(), list[Problem]()
    played = GenerationBench(
        model=model or ("qwen3-0.6b" if gpus else "tiny"),
        prompts=prompts or (64 if gpus else 4),
        generations=8,
        tokens=tokens or (1024 if gpus else 64),
        turns=(turns or (8 if gpus else 4),),
        spread=0.5,
        pause=pause,
        rounds=rounds,
        extra=override or [],
        agent=True,
    )
    sizes = numbers("--bodies", bodies, "7KB,77KB", problems, UNITS)
    run_bench(AgentsBench(sizes, sessions, played if engine else None), as_json, problems)
