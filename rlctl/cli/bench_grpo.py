"""`rlctl bench grpo`: checks what is asked for, runs it, shows a table, a plot or JSON."""

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from rlctl.cli.bench_common import check_model, check_plot, finish, named, tell
from rlctl.cli.output import OK, examples
from rlctl.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rich.console import Console

    from rlctl.bench.grpo import GrpoBench, GrpoResults, ModeRow

_NAMES = {
    "colocated": "sync, colocated",
    "apart": "sync, apart",
    "drained": "async, drained",
    "in-flight": "async, in flight",
}


EPILOG = examples(
    "rlctl bench grpo",
    "rlctl bench grpo --model qwen3-1.7b --gpus 4 --trainers 2 --age 2 --plot grpo.png",
    "rlctl bench grpo --modes apart,in-flight --lengths 2000,1.0,16384 --json",
)


def grpo(
    model: Annotated[
        str | None, typer.Option(help="A shape by name, or a Hugging Face folder. Default: tiny, on GPU qwen3-1.7b.")
    ] = None,
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
    modes: Annotated[str | None, typer.Option(help=f"Of {', '.join(_NAMES)}. Default: all that differ here.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="key=value for every run; again for more.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of the table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG or SVG here; needs matplotlib.")] = None,
) -> None:
    """Time the same GRPO work synchronous and asynchronous, on as many devices, and say what each side waited for."""
    sizes = (gpus, trainers, prompts, generations, steps, age)
    bench, folder = _checked(model, sizes, lengths, modes, override or [], plot)
    raise typer.Exit(_measure(bench, folder, as_json, plot))


def _checked(
    model: str | None,
    sizes: tuple[int | None, int | None, int, int, int, int],
    lengths: str | None,
    modes: str | None,
    override: list[str],
    plot: Path | None,
) -> tuple["GrpoBench", Path]:
    from rlctl.bench.grpo import GrpoBench
    from rlctl.bench.models import shape_folder
    from rlctl.telemetry.devices import count_gpus

    problems: list[Problem] = []
    check_plot(plot, problems)
    there = count_gpus()
    gpus, trainers, prompts, generations, steps, age = sizes
    gpus = there if gpus is None else gpus
    if gpus > there:
        problems.append(Problem("--gpus", "", f"{gpus}: this machine has {there}"))
    trainers = trainers or max(1, gpus // 2)
    if gpus and trainers >= gpus > 1:
        problems.append(Problem("--trainers", "", f"{trainers} of {gpus} leave no device for engines"))
    if gpus == 1:
        what = "1: asynchronous runs need a device for each side; at least 2, or 0 for CPU"
        problems.append(Problem("--gpus", "", what))
    # With one device, or none, nothing can stand apart that was colocated.
    usual = ",".join(_NAMES) if gpus > 1 else "colocated,drained,in-flight"
    chosen = named("--modes", modes or usual, _NAMES, problems)
    mean, sigma, cap = _lengths(lengths or ("600,1.0,4096" if gpus else "32,1.0,192"), problems)
    name = check_model(model or ("qwen3-1.7b" if gpus else "tiny"), problems)
    if problems:
        raise ConfigError(problems)
    folder = Path(tempfile.mkdtemp(prefix="rlctl-bench-"))
    shape = shape_folder(name, folder)
    numbers = (prompts, generations, steps, age)
    return GrpoBench(shape, name, gpus, trainers, *numbers, mean, sigma, cap, chosen, override), folder


def _lengths(given: str, problems: list[Problem]) -> tuple[float, float, int]:
    try:
        mean, sigma, cap = (float(part) for part in given.split(","))
        if min(mean, sigma, cap) > 0 and cap == int(cap):
            return mean, sigma, int(cap)
    except ValueError:
        pass
    problems.append(Problem("--lengths", "", f"{given!r}: mean, sigma and cap above 0, like 600,1.0,4096"))
    return 1.0, 1.0, 1


def _measure(bench: "GrpoBench", folder: Path, as_json: bool, plot: Path | None) -> int:
    from rlctl.bench.grpo import run_grpo_bench
    from rlctl.bench.plot import write_grpo_plot

    def report(results: "GrpoResults") -> int:
        tell(results.as_json(), partial(_show, results), as_json, partial(write_grpo_plot, results), plot)
        return OK

    return finish(lambda say: run_grpo_bench(bench, folder, say), report, folder)


def _show(results: "GrpoResults", out: "Console") -> None:
    if not out.is_terminal:
        out.width = 160
    where = f"{results.gpus} GPUs" if results.gpus else "CPU"
    split = f", apart {results.trainers} train" if results.gpus > 1 else ""
    ceiling = f": {results.ceiling:,.0f} tokens/s/device if both sides always worked" if results.ceiling else ""
    out.print(Text(f"{results.model} on {where}{split}{ceiling}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    wide = out.width >= 120
    names = ["step", "tok/s/dev", "x first", "share", "trainer idle", "gen idle", "refit"]
    for name in [*names, *(["stall", "age", "seqs", "ms/tok", "trainer waits for"] if wide else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in results.rows:
        table.add_row(*_cells(results, row, wide))
    out.print(table)
    out.print(Text(_LEGEND, style="dim"))


_LEGEND = (
    "step: seconds; tok/s/dev: prompt and answer tokens over wall time and all devices; share: of the ceiling; idle: "
    "share of the step; refit: share of the generator's time that changing weights took; stall: longest gap between "
    "two tokens of a running request, ms; age: mean steps; seqs: decoded at a time by an engine; "
    "ms/tok: of a token of each"
)


def _cells(results: "GrpoResults", row: "ModeRow", wide: bool) -> list[str]:
    first = results.rows[0]
    waits = sorted(row.idle.items(), key=lambda pair: -pair[1])[:3]
    more = [
        f"{row.stall * 1e3:.0f}",
        f"{row.age:.2f}",
        f"{row.sequences:.0f}" if row.sequences else "",
        f"{row.decode_step * 1e3:.1f}" if row.decode_step else "",
        ", ".join(f"{name.removeprefix('idle_')} {share:.0%}" for name, share in waits),
    ]
    return [
        row.mode,
        f"{row.step:.2f}",
        f"{row.effective:,.0f}",
        f"{row.effective / first.effective:.2f}",
        "" if (share := results.share(row)) is None else f"{share:.0%}",
        f"{row.trainer_idle:.0%}",
        f"{row.generator_idle:.0%}",
        f"{row.stood:.1%}" if row.mode.startswith("async") else "",
        *(more if wide else []),
    ]
