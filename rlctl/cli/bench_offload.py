"""`rlctl bench offload`: checks what is asked for, runs it, shows two small tables or JSON."""

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from rlctl.cli.bench_common import check_model, finish, tell, words
from rlctl.cli.output import OK, examples
from rlctl.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rich.console import Console

    from rlctl.bench.offload import Copies, OffloadBench, OffloadResults

_LEGEND = (
    "link: one page-locked copy of 1 GiB; mover: all optimizer state; step: log-probs of all tokens, then an update, "
    "medians in seconds; peak: most of the device allocated during log-probs; B/p: bytes of a parameter, allocated on "
    "the device after an update, and in what the process has grown by"
)

EPILOG = examples(
    "rlctl bench offload",
    "rlctl bench offload --model qwen3-8b --set trainer.activation_checkpointing=true",
    "rlctl bench offload --model qwen3-1.7b --backend megatron --json",
)


def offload(
    model: Annotated[
        str | None, typer.Option(help="A shape by name, or a Hugging Face folder. Default: tiny, on GPU qwen3-1.7b.")
    ] = None,
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
) -> None:
    """Time optimizer state on its way to the host and back, alone and beside a step, on one device."""
    settings = [f"trainer.backend={backend}", f"trainer.micro_batch_tokens={micro_batch_tokens}", *(override or [])]
    bench, folder = _checked(model, backend, seq_len, batch, steps, settings)
    raise typer.Exit(_measure(bench, folder, as_json))


def _checked(
    model: str | None, backend: str, seq_len: int | None, batch: int, steps: int, settings: list[str]
) -> tuple["OffloadBench", Path]:
    from rlctl.bench.models import longest, shape_folder
    from rlctl.bench.offload import OffloadBench
    from rlctl.config.load import load
    from rlctl.telemetry.devices import count_gpus

    problems: list[Problem] = []
    gpus = count_gpus()
    words("--backend", backend, ("fsdp", "megatron"), problems)
    name = check_model(model or ("qwen3-1.7b" if gpus else "tiny"), problems)
    if problems:
        raise ConfigError(problems)
    section = load("sft", None, settings).config.trainer
    tokens = seq_len or (4096 if gpus else 128)
    folder = Path(tempfile.mkdtemp(prefix="rlctl-bench-"))
    shape = shape_folder(name, folder)
    most = min(longest(shape), section.micro_batch_tokens)
    if tokens > most:
        shutil.rmtree(folder)
        what = f"{tokens}: the model, or a pass, holds {most} at most"
        raise ConfigError([Problem("--seq-len", "", what)])
    return OffloadBench(shape, name, section, tokens, batch, steps, "cuda:0" if gpus else "cpu"), folder


def _measure(bench: "OffloadBench", folder: Path, as_json: bool) -> int:
    from rlctl.bench.offload import run_offload_bench

    def report(results: "OffloadResults") -> int:
        tell(results.as_json(), lambda out: show(results, out), as_json, lambda _: None, None)
        return OK

    return finish(lambda say: run_offload_bench(bench, folder, say), report, folder)


def show(results: "OffloadResults", out: "Console") -> None:
    """Copies, then steps, then what is hidden."""
    what = f"{results.batch} sequences of {results.tokens:,} tokens a step"
    out.print(Text(f"{results.model}, backend {results.backend}: {what}"))
    if results.copies:
        out.print(_copies(results.copies))
    table = _table("optimizer state", ("log-probs", "update", "step", "peak GB", "moved GB", "B/p dev", "B/p host"))
    for row in results.rows:
        cells = (f"{row.log_probs:.3f}", f"{row.train:.3f}", f"{row.step:.3f}", f"{row.peak / 1e9:.2f}")
        held = f"{row.device:.1f}", f"{row.host:.1f}"
        table.add_row(row.kind, *cells, f"{sum(row.moved) / 1e9:.2f}", *held)
    out.print(table)
    if results.copies is None:
        out.print(Text("no GPU: optimizer state is in host memory at all times, 0 bytes were moved"))
        return
    moves = f"the moves alone take {results.moving:.3f} s"
    out.print(Text(f"a step takes {results.cost:+.3f} s longer; {moves}: {results.hidden:.0%} of them hidden"))
    out.print(Text(_LEGEND, style="dim"))


def _copies(copies: "Copies") -> Table:
    table = _table(f"{copies.nbytes / 1e9:.2f} GB of state", ("link GB/s", "mover GB/s", "share"))
    for way, link, mover, share in zip(("to host", "to device"), copies.link, copies.mover, copies.shares):
        table.add_row(way, f"{link / 1e9:.1f}", f"{mover / 1e9:.1f}", f"{share:.0%}")
    return table


def _table(first: str, names: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table
