"""`rlctl bench`: each command makes a `Bench` from its options; `run_bench` checks it, measures and shows results."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from rlctl.bench.frame import numbers, words
from rlctl.cli.arguments import AsJson, finite
from rlctl.cli.bench_frame import RunSettings, TrainedModel, read_lengths, run_bench
from rlctl.cli.output import examples
from rlctl.config.errors import Problem
from rlctl.utils.devices import count_gpus

app = typer.Typer(
    help="Measure this machine, from refits to whole runs, and compare algorithms.",
    no_args_is_help=True,
)


@app.command(
    epilog=examples(
        "rlctl bench refit",
        "rlctl bench refit --model qwen3-8b --num-buffers 1,2,3",
        "rlctl bench refit --model llama-8b --trainers 2 --generators 2 --mode staged",
        "rlctl bench refit --model path/to/hf-folder --json > refit.json",
    )
)
def refit(
    model: Annotated[
        str | None,
        typer.Option(
            help="A shape by name, or a Hugging Face folder, which needs no weights. Default: tiny; on GPUs qwen3-8b."
        ),
    ] = None,
    trainers: Annotated[int, typer.Option(min=1, help="Trainer ranks. Each holds a share of every tensor.")] = 1,
    generators: Annotated[int, typer.Option(min=1, help="Engines.")] = 1,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices of each engine.")] = 1,
    num_buffers: Annotated[str | None, typer.Option(help="A row for each, like 1,2,3. Default: a run's.")] = None,
    mode: Annotated[str | None, typer.Option(help="A row for each: direct, staged. On a CPU: auto.")] = None,
    transport: Annotated[
        str | None, typer.Option(help="A row for each: shm, ipc, broadcast. Default: a run's.")
    ] = None,
    colocated: Annotated[bool, typer.Option("--colocated", help="Trainer and engines share devices.")] = False,
    master: Annotated[str, typer.Option(help="The dtype of the trainer's weights: float32 or bfloat16.")] = "float32",
    checksum: Annotated[
        str | None, typer.Option(help="A row for each: all, sampled, off. Default: a run's; on a CPU off too.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=2, help="Refits for each row, at most 30 of the plain link. The first is not counted.")
    ] = 10,
    updates: Annotated[
        int, typer.Option(min=0, help="Refits for each row while requests run, to measure their stall.")
    ] = 8,
    lora_rank: Annotated[
        int, typer.Option(min=0, max=512, help="Send LoRA adapters of this rank, proven live; 0: the weights.")
    ] = 0,
    eager: Annotated[
        bool, typer.Option("--eager", help="Run engines without CUDA graphs, so that they start faster.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time refits, weights from trainer ranks into vLLM's parameters, against the plain link.

    Exit code 1 if one bit of a delivered weight differs from the sent one.
    """
    from rlctl.bench.refit import RefitBench
    from rlctl.preflight.load import load
    from rlctl.refit.protocol import Checks, Kind

    problems: list[Problem] = []
    gpus = count_gpus()
    defaults = load("grpo", None, []).settled.config.refit
    default_modes = "direct,staged" if gpus and not lora_rank else "auto"
    default_checks = "sampled" if gpus else "all,off"
    # Adapters are always proven whole.
    if lora_rank:
        default_checks = "all"
    words("--master", master, ("float32", "bfloat16"), problems)
    bench = RefitBench(
        model=model or ("qwen3-8b" if gpus else "tiny"),
        gpus=gpus,
        trainers=trainers,
        engines=generators,
        tensor_parallel=tensor_parallel,
        colocated=colocated or gpus == 1,
        transports=words("--transport", transport, get_args(Kind), problems) if transport else (),
        modes=words("--mode", mode or default_modes, ("auto", "direct", "staged"), problems),
        num_buffers=numbers("--num-buffers", num_buffers or str(defaults.num_buffers), "1,2,3", problems),
        checks=words("--checksum", checksum or default_checks, get_args(Checks), problems),
        master=master,
        defaults=defaults,
        rounds=rounds,
        updates=updates,
        enforce_eager=eager,
        lora_rank=lora_rank,
    )
    run_bench(bench, as_json, problems)


@app.command(
    epilog=examples(
        "rlctl bench grpo",
        "rlctl bench grpo --model qwen3-1.7b --gpus 4 --trainers 2",
        "rlctl bench grpo --modes apart,in-flight --lengths 2000,1.0,16384 --json",
    )
)
def grpo(
    model: TrainedModel = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="Devices of every run. Default: all.")] = None,
    trainers: Annotated[
        int | None, typer.Option(min=1, help="Trainer ranks among them, if not colocated. Default: half.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts in each step.")] = 16,
    generations: Annotated[int, typer.Option(min=2, help="Rollouts of each prompt.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps of every run, after some that are not.")] = 6,
    age: Annotated[int, typer.Option(min=1, help="max_trajectory_age_steps of the in-flight run.")] = 2,
    lengths: Annotated[
        str | None,
        typer.Option(help="Mean, sigma and cap of log-normal lengths. Default: 600,1.0,4096; on a CPU 32,1.0,192."),
    ] = None,
    modes: Annotated[
        str | None, typer.Option(help="Any of colocated, apart, drained, in-flight. Default: all that differ here.")
    ] = None,
    override: RunSettings = None,
    as_json: AsJson = False,
) -> None:
    """Time the same GRPO work synchronous and asynchronous, on as many devices, and the idle time of each side."""
    from rlctl.bench.grpo import MODES, GrpoBench

    problems: list[Problem] = []
    installed = count_gpus()
    devices = installed if gpus is None else gpus
    # On a CPU the modes "apart" and "colocated" are the same, because trainer and engines share the cores.
    default_modes = ",".join(MODES)
    if devices == 0:
        default_modes = "colocated,drained,in-flight"
    elif devices == 1:
        default_modes = "colocated"
    bench = GrpoBench(
        model=model or ("qwen3-1.7b" if devices else "tiny"),
        installed=installed,
        gpus=devices,
        trainers=trainers or max(1, devices // 2),
        prompts=prompts,
        generations=generations,
        steps=steps,
        age=age,
        lengths=read_lengths(lengths or ("600,1.0,4096" if devices else "32,1.0,192"), problems),
        modes=words("--modes", modes or default_modes, MODES, problems),
        extra=override or [],
    )
    run_bench(bench, as_json, problems)


@app.command(
    epilog=examples(
        "rlctl bench sft",
        "rlctl bench sft --seq-len 4096 --modes eager,compiled",
        "rlctl bench sft --model qwen3-8b --ranks 4 --modes eager,megatron-tp2-pp2",
    )
)
def sft(
    model: TrainedModel = None,
    ranks: Annotated[int, typer.Option(min=1, help="Trainer ranks.")] = 1,
    seq_len: Annotated[
        int | None, typer.Option(min=3, help="Tokens of every sample. Default: 4096; on a CPU 128.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples in each step. Default: 8 for each rank.")] = None,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens that a rank packs into one pass.")] = 16384,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps of every run, after the first.")] = 10,
    modes: Annotated[
        str | None,
        typer.Option(
            help="Any of eager, eager-graph, compiled, compiled-graph (with FSDP2), megatron-tp2 and the like. "
            "Default: the first four; on a CPU the two eager ones."
        ),
    ] = None,
    override: RunSettings = None,
    as_json: AsJson = False,
) -> None:
    """Time a training step, eager and compiled, by ordinary calls and through a compiled graph."""
    from rlctl.bench.sft import MODES, SftBench

    gpus = count_gpus()
    default_modes = list(MODES) if gpus else ["eager", "eager-graph"]
    bench = SftBench(
        model=model or ("qwen3-1.7b" if gpus else "tiny"),
        gpus=gpus,
        ranks=ranks,
        tokens=seq_len or (4096 if gpus else 128),
        batch=batch or 8 * ranks,
        micro_batch=micro_batch_tokens,
        steps=steps,
        modes=modes.split(",") if modes else default_modes,
        extra=override or [],
    )
    run_bench(bench, as_json)


@app.command(
    epilog=examples(
        "rlctl bench generation",
        "rlctl bench generation --model qwen3-0.6b --tokens 256 --turns 1",
        "rlctl bench generation --prompts 32 --pause 1 --set generation.max_num_seqs=128 --json",
    )
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

    gpus = count_gpus()
    problems: list[Problem] = []
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


@app.command(epilog=examples("rlctl bench agents", "rlctl bench agents --bodies 7KB --sessions 64 --json"))
def agents(
    bodies: Annotated[str, typer.Option(help="Sizes of a session's first request, a row for each.")] = "7KB,77KB",
    sessions: Annotated[int, typer.Option(min=1, help="Sessions at one time, in one process.")] = 512,
    as_json: AsJson = False,
) -> None:
    """Time the endpoint of agents, in the agents' process and in the driver."""
    from rlctl.bench.agents import AgentsBench
    from rlctl.bench.dispatch import UNITS

    problems: list[Problem] = []
    body_sizes = numbers("--bodies", bodies, "7KB,77KB", problems, UNITS)
    run_bench(AgentsBench(body_sizes, sessions), as_json, problems)


@app.command(
    epilog=examples(
        "rlctl bench offload",
        "rlctl bench offload --set trainer.activation_checkpointing=true",
        "rlctl bench offload --model qwen3-1.7b --backend megatron --json",
    )
)
def offload(
    model: TrainedModel = None,
    backend: Annotated[str, typer.Option(help="The training backend: fsdp or megatron.")] = "fsdp",
    seq_len: Annotated[
        int | None, typer.Option(min=3, help="Tokens of every sequence. Default: 4096; on a CPU 128.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in each step.")] = 8,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one pass.")] = 16384,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps of each kind, after the first.")] = 5,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="A key=value of the trainer section. Repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time the moves of optimizer state to the host and back, alone and during a step, on one device."""
    from rlctl.bench.offload import OffloadBench

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
    run_bench(bench, as_json)


@app.command(
    epilog=examples(
        "rlctl bench dispatch",
        "rlctl bench dispatch --workers 1,8 --payloads 1KB,64MB --json",
    )
)
def dispatch(
    workers: Annotated[str, typer.Option(help="Sizes of the worker groups.")] = "1,2,4,8",
    payloads: Annotated[
        str, typer.Option(help="What each worker gets with a call, in bytes, KB or MB.")
    ] = "1KB,1MB,8MB",
    calls: Annotated[int, typer.Option(min=20, help="Calls for each row. A row of slow ones ends after 10 s.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Time one call of the driver to a group of workers, ordinary and compiled."""
    from rlctl.bench.dispatch import UNITS, DispatchBench

    problems: list[Problem] = []
    group_sizes = numbers("--workers", workers, "1,2,4", problems)
    payload_sizes = numbers("--payloads", payloads, "1KB,8MB", problems, UNITS)
    run_bench(DispatchBench(group_sizes, payload_sizes, calls), as_json, problems)


@app.command(epilog=examples("rlctl bench sandbox", "rlctl bench sandbox --kinds bwrap --seconds 20 --json"))
def sandbox(
    kinds: Annotated[str, typer.Option(help="Kinds of sandbox, with commas.")] = "bwrap,process",
    threads: Annotated[int, typer.Option(min=0, max=256, help="Programs at one time. 0: as many as cores.")] = 0,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Seconds of each row.", callback=finite)] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Count the programs a second that each sandbox of this machine runs."""
    from rlctl.bench.sandbox import SandboxBench
    from rlctl.sandbox.open_sandbox import LOCAL_KINDS
    from rlctl.utils.devices import usable_cores

    problems: list[Problem] = []
    names = words("--kinds", kinds, LOCAL_KINDS, problems)
    chosen = [name for name in LOCAL_KINDS if name in names]
    run_bench(SandboxBench(chosen, threads or usable_cores(), seconds), as_json, problems)


@app.command(
    epilog=examples(
        "rlctl bench scale",
        "rlctl bench scale --models qwen3-8b --gpus 8,256 --json",
    )
)
def scale(
    models: Annotated[str, typer.Option(help="Shapes by name, or Hugging Face folders, with commas.")] = (
        "qwen3-8b,qwen3-30b-a3b,qwen3-235b-a22b"
    ),
    gpus: Annotated[str, typer.Option(help="A row for each: whole nodes of 8.")] = "8,64,512,4096",
    as_json: AsJson = False,
) -> None:
    """Measure the driver's part of runs on GPUs that are not there: plan, start, rebuild, batch."""
    from rlctl.bench.scale import ScaleBench

    problems: list[Problem] = []
    gpu_counts = numbers("--gpus", gpus, "8,64", problems)
    shapes = [shape.strip() for shape in models.split(",")]
    run_bench(ScaleBench(shapes, gpu_counts), as_json, problems)


@app.command(
    epilog=examples(
        "rlctl bench start",
        "rlctl bench start sft-tiny --rounds 1 --cold",
        "rlctl bench start my.yaml --set trainer.compile=false --json",
    )
)
def start(
    recipe: Annotated[str, typer.Argument(help="The recipe to start.", show_default=False)] = "grpo-tiny",
    override: RunSettings = None,
    rounds: Annotated[int, typer.Option(min=1, help="Starts, one after the other.")] = 3,
    cold: Annotated[
        bool,
        typer.Option("--cold", help="Read packages from the disk again, and compile all code, at each start."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time a run's start, from the command to the end of its first step, with the CPU seconds of each process."""
    from rlctl.bench.starts import StartBench
    from rlctl.preflight.load import load

    kind = load(None, recipe, override or []).settled.config.kind
    run_bench(StartBench(recipe=recipe, kind=kind, rounds=rounds, cold=cold, overrides=override or []), as_json, [])


@app.command(
    epilog=examples(
        "rlctl bench algorithms",
        "rlctl bench algorithms grpo gspo dapo --seeds 5 --plot algorithms.png",
        "rlctl bench algorithms grpo 'grpo grpo.loss.clip_high=0.4' my-algorithm.yaml --recipe my.yaml",
    )
)
def algorithms(
    algorithm: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of recipes/algorithms, files like those, or key=value. Default: all of recipes/algorithms.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[str, typer.Option(help="The recipe that all of them train. It needs validation data.")] = (
        "grpo-tiny"
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each algorithm, with run.seed 0, 1 and so on.")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of every run. Default: the recipe's.")] = None,
    target: Annotated[
        float, typer.Option(min=0, max=1, help="Held-out accuracy up to which rollouts and seconds are counted.")
    ] = 0.9,
    override: RunSettings = None,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="Write a chart to this PNG or SVG file. Needs matplotlib.")] = None,
) -> None:
    """Compare how algorithms learn: held-out accuracy against rollouts and seconds, over several seeds.

    Whole runs, one after the other. Ctrl-C shows the measurements until then.
    """
    from rlctl.bench.algorithms import AlgorithmBench
    from rlctl.config.builtin import algorithm_names

    bench = AlgorithmBench(
        algorithms=algorithm or algorithm_names(),
        recipe=recipe,
        seeds=seeds,
        steps=steps,
        target=target,
        extra=override or [],
    )
    run_bench(bench, as_json, plot=plot)
