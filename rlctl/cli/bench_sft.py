"""`rlctl bench sft`: checks what is asked for, runs it, shows a table, a plot or JSON."""

import shutil
import tempfile
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from rlctl.cli.bench_common import check_model, check_plot, finish, tell
from rlctl.cli.output import OK, examples
from rlctl.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rich.console import Console

    from rlctl.bench.sft import SftBench, SftResults

_MEGATRON = "megatron[-tpN][-ppN][-cpN][-epN][-compiled][-graph]"
_COSTS = 8
_LEGEND = (
    "first: seconds of the first step; step: median of those after it; tok/s/dev: trained tokens over the seconds of "
    "the update; MFU: tok/s/dev x (6 N + 12 L H T) / the device's bf16 peak (PaLM, arXiv 2204.02311, appendix B); "
    "busy: share of an update in which the device worked; graph: ranks called through a compiled graph, after a warm-up"
)

EPILOG = examples(
    "rlctl bench sft",
    "rlctl bench sft --model qwen3-1.7b --seq-len 4096 --modes eager,compiled,compiled-graph --plot sft.png",
    "rlctl bench sft --model qwen3-8b --ranks 4 --modes eager,megatron,megatron-tp2,megatron-tp2-pp2 --json",
)


def sft(
    model: Annotated[
        str | None, typer.Option(help="A shape by name, or a Hugging Face folder. Default: tiny, on GPU qwen3-1.7b.")
    ] = None,
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
    override: Annotated[
        list[str] | None, typer.Option("--set", help="key=value for every run; again for more.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of the table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG or SVG here; needs matplotlib.")] = None,
) -> None:
    """Time a training step, eager and compiled, by ordinary calls and through a compiled graph, and say what costs."""
    problems: list[Problem] = []
    check_plot(plot, problems)
    sizes = (ranks, seq_len, batch, micro_batch_tokens, steps)
    bench, folder = _checked(model, sizes, modes, override or [], problems)
    raise typer.Exit(_measure(bench, folder, as_json, plot))


def _checked(
    model: str | None,
    sizes: tuple[int, int | None, int | None, int, int],
    modes: str | None,
    override: list[str],
    problems: list[Problem],
) -> tuple["SftBench", Path]:
    from rlctl.bench.models import longest, shape_folder
    from rlctl.bench.sft import MODES, SftBench, mode_settings
    from rlctl.telemetry.devices import count_gpus

    gpus = count_gpus()
    ranks, tokens, batch, micro_batch, steps = sizes
    if ranks > gpus > 0:
        problems.append(Problem("--ranks", "", f"{ranks}: this machine has {gpus} GPUs"))
    tokens, batch = tokens or (4096 if gpus else 128), batch or 8 * ranks
    if batch < ranks:
        problems.append(Problem("--batch", "", f"{batch}: at least one sample for each of the {ranks} ranks"))
    usual = list(MODES) if gpus else ["eager", "eager-graph"]
    chosen = modes.split(",") if modes else usual
    for mode in chosen:
        if mode_settings(mode) is None:
            near = f"; did you mean {close[0]}?" if (close := get_close_matches(mode, MODES, 1)) else ""
            problems.append(Problem("--modes", "", f"{mode}: allowed are {', '.join(MODES)}, {_MEGATRON}{near}"))
    name = check_model(model or ("qwen3-1.7b" if gpus else "tiny"), problems)
    if problems:
        raise ConfigError(problems)
    folder = Path(tempfile.mkdtemp(prefix="rlctl-bench-"))
    shape = shape_folder(name, folder)
    if tokens > (most := longest(shape)):
        shutil.rmtree(folder)
        raise ConfigError([Problem("--seq-len", "", f"{tokens}: the model's longest sequence is {most}")])
    return SftBench(shape, name, ranks, tokens, batch, micro_batch, steps, chosen, override), folder


def _measure(bench: "SftBench", folder: Path, as_json: bool, plot: Path | None) -> int:
    from rlctl.bench.plot import write_sft_plot
    from rlctl.bench.sft import run_sft_bench

    def report(results: "SftResults") -> int:
        tell(results.as_json(), partial(show, results), as_json, partial(write_sft_plot, results), plot)
        return OK

    return finish(lambda say: run_sft_bench(bench, folder, say), report, folder)


def show(results: "SftResults", out: "Console") -> None:
    """The table, and below it where the time of the last row's update went."""
    what = f"{results.batch} samples of {results.tokens:,} tokens a step"
    out.print(Text(f"{results.model} on {results.ranks} rank{'s' * (results.ranks > 1)}: {what}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    for name in ("first", "step", "tok/s/dev", "MFU", "x first", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in results.rows:
        table.add_row(
            row.mode,
            f"{row.first:.3f}",
            f"{row.step:.3f}",
            f"{row.rate:,.0f}",
            "" if row.mfu is None else f"{row.mfu:.1%}",
            f"{results.speedup(row):.2f}",
            f"{row.busy:.0%}",
        )
    out.print(table)
    last = results.rows[-1]
    out.print(Text(f"where {last.mode} spends it (operations by their own time on the device):"))
    for cost in last.costs[:_COSTS]:
        out.print(Text(f"  {cost.share:5.1%}  {cost.name}", overflow="ellipsis", no_wrap=True))
    out.print(Text(_LEGEND, style="dim"))
