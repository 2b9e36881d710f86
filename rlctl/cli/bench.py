"""`rlctl bench`: checks what is asked for, measures, shows a table, a plot or JSON."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from rlctl.cli.bench_common import Say, check_model, check_plot, finish, tell, words
from rlctl.cli.output import FAILED, OK, examples
from rlctl.cluster.placement import Placement
from rlctl.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlctl.bench.refit import RefitBench
    from rlctl.bench.results import Results

MODES = ("auto", "direct", "staged")

app = typer.Typer(
    help="Measure this machine: weight transfer, training steps, calls to workers, sync against async.",
    no_args_is_help=True,
)


@app.callback()
def bench() -> None:
    """Measure this machine: how weights reach the generator, what a call costs, what running both sides is worth."""


@app.command(
    epilog=examples(
        "rlctl bench refit",
        "rlctl bench refit --model qwen3-8b --num-buffers 1,2,3 --plot refit.png",
        "rlctl bench refit --model llama-8b --trainers 2 --generators 2 --mode staged",
        "rlctl bench refit --model path/to/hf-folder --json > refit.json",
    )
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
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of the table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG or SVG here; needs matplotlib.")] = None,
) -> None:
    """Time weights from trainer ranks into vLLM's parameters, beside the plain link and other schemes, bit by bit.

    Ends with 1 if any delivered weight differs from the one sent.
    """
    asked = {"mode": mode, "transport": transport, "checksum": checksum, "num-buffers": num_buffers, "plot": plot}
    sizes = {"trainers": trainers, "generators": generators, "tensor_parallel": tensor_parallel}
    plan = _checked(model, sizes, asked, colocated, master)
    counts = {"rounds": rounds, "updates": updates, "references": references, "enforce_eager": eager}
    raise typer.Exit(_measure(lambda logs: plan(logs, counts), as_json, plot))


def _checked(
    model: str | None, sizes: dict[str, int], asked: dict[str, Any], colocated: bool, master: str
) -> "Callable[[str, dict[str, Any]], RefitBench]":
    """What to measure, less the place of its logs and its counts. Raises ConfigError with every problem at once."""
    from rlctl.config.load import load
    from rlctl.refit.messages import Checks, Kind
    from rlctl.telemetry.devices import count_gpus

    problems: list[Problem] = []
    gpus = count_gpus()
    defaults = load("grpo", None, []).config.refit  # type: ignore[union-attr]
    model = check_model(model or ("qwen3-8b" if gpus else "tiny"), problems)
    placement = _placement(gpus, sizes, colocated, problems)
    modes = words("--mode", asked["mode"] or ("direct,staged" if gpus else "auto"), MODES, problems)
    if "direct" in modes and not gpus:
        why = "direct needs a GPU: on CPU vLLM repacks its weights; allowed: auto, staged"
        problems.append(Problem("--mode", "", why))
    kinds = words("--transport", asked["transport"] or _usual(placement, sizes), get_args(Kind), problems)
    usual = "sampled" if gpus else "all,off"
    checks = words("--checksum", asked["checksum"] or usual, get_args(Checks), problems)
    words("--master", master, ("float32", "bfloat16"), problems)
    buffers = _numbers(asked["num-buffers"] or str(defaults.num_buffers), problems)
    check_plot(asked["plot"], problems)
    if problems:
        raise ConfigError(problems)

    def bench(logs: str, counts: dict[str, Any]) -> "RefitBench":
        from rlctl.bench.refit import RefitBench

        return RefitBench(
            model=model,
            placement=placement,
            tensor_parallel=sizes["tensor_parallel"],
            transports=tuple(kinds),
            modes=tuple(modes),
            num_buffers=tuple(buffers),
            master=master,
            dtype="bfloat16" if gpus else "float32",
            buffer_memory_ratio=defaults.buffer_memory_ratio,
            checks=tuple(checks),
            timeout_s=defaults.timeout_s,
            logs=logs,
            **counts,
        )

    return bench


def _placement(gpus: int, sizes: dict[str, int], colocated: bool, problems: list[Problem]) -> Placement:
    from rlctl.cluster.placement import Pools, place, this_machine

    if not gpus and sizes["tensor_parallel"] > 1:
        problems.append(Problem("--tensor-parallel", "", "on CPU an engine is one process: allowed is 1"))
    shape = (sizes["trainers"], sizes["generators"], sizes["tensor_parallel"])
    try:
        return place(this_machine(gpus), Pools(*shape, colocated or gpus == 1))
    except ValueError as error:
        problems.append(Problem("--trainers, --generators, --tensor-parallel", "", str(error)))
        return place(this_machine(0), Pools(*shape, colocated))


def _usual(placement: Placement, sizes: dict[str, int]) -> str:
    from rlctl.cluster.processes import usual_transport

    return usual_transport(placement, sizes["generators"])


def _numbers(given: str, problems: list[Problem]) -> list[int]:
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdigit() and int(part) >= 1 for part in parts):
        problems.append(Problem("--num-buffers", "", f"{given!r}: numbers from 1 on with commas, like 1,2,3"))
        return []
    return [int(part) for part in parts]


def _measure(make: "Callable[[str], RefitBench]", as_json: bool, plot: Path | None) -> int:
    from rlctl.bench.refit import run_bench
    from rlctl.cluster.launch import shared_memory
    from rlctl.cluster.local import local_ray

    logs = Path(tempfile.mkdtemp(prefix="rlctl-bench-"))

    def measure(say: Say) -> "Results":
        with local_ray(logs) as reaper, reaper.folder("rlctl-bench-", shared_memory()) as folder:
            return run_bench(make(str(logs)), folder, say)

    return finish(measure, lambda results: _report(results, as_json, plot), logs)


def _report(results: "Results", as_json: bool, plot: Path | None) -> int:
    from rlctl.bench.plot import write_plot
    from rlctl.cli.bench_view import print_results

    tell(results.as_json(), partial(print_results, results), as_json, partial(write_plot, results), plot)
    for row in results.wrong:
        names = ", ".join(row.wrong[:3]) + (f" and {len(row.wrong) - 3} more" if len(row.wrong) > 3 else "")
        typer.echo(f"error: {row.label}: delivered weights differ from the sent ones: {names}", err=True)
    return FAILED if results.wrong else OK
