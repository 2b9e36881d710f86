"""The pictures of `rlctl bench`: a bar a scheme or a kind of run, and the bound as the line that none passes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlctl.bench.dispatch import DispatchRow
    from rlctl.bench.grpo import GrpoResults
    from rlctl.bench.results import Results
    from rlctl.bench.sft import SftResults


def write_plot(results: "Results", path: Path) -> None:
    """PNG or SVG by the name's ending; appears whole or not at all. Needs matplotlib."""
    bound = results.payload / results.bound / 1e9
    bars = [
        (row.label, results.rate(row), f"{results.rate(row):.0f} GB/s, {results.share(row):.0%}", bool(row.mode))
        for row in results.rows
    ]
    ends = f"{results.trainers} trainer ranks, {results.engines} engines"
    title = f"{results.model}: {results.payload / 1e9:.1f} GB, {ends}"
    _write(bars, bound, title, "GB/s delivered to each engine; dashed: the plain link", path)


def write_grpo_plot(results: "GrpoResults", path: Path) -> None:
    """The same for kinds of run."""
    bars = [
        (
            row.mode,
            row.effective,
            f"{row.effective:,.0f}" + (f", {share:.0%}" if (share := results.share(row)) else ""),
            row.mode.startswith("async"),
        )
        for row in results.rows
    ]
    where = f"{results.gpus} GPUs" if results.gpus else "CPU"
    label = "tokens/s/device end to end" + ("; dashed: both sides always at work" if results.ceiling else "")
    _write(bars, results.ceiling, f"GRPO, {results.model}, {where}", label, path)


def write_sft_plot(results: "SftResults", path: Path) -> None:
    """The same for ways to run a training step."""
    bars = [
        (
            row.mode,
            row.rate,
            f"{row.rate:,.0f}" + (f", {row.mfu:.0%} MFU" if row.mfu is not None else ""),
            "compiled" in row.mode,
        )
        for row in results.rows
    ]
    title = f"SFT, {results.model}, {results.ranks} rank{'s' * (results.ranks > 1)}, samples of {results.tokens} tokens"
    _write(bars, None, title, "tokens/s/device trained", path)


def write_dispatch_plot(rows: "list[DispatchRow]", path: Path) -> None:
    """How much faster a compiled call is than ordinary ones, a bar a size of group and payload."""
    bars = [
        (f"{row.workers} x {row.payload / 1024:,.0f} KB", row.ratio, f"{row.ratio:.1f}x", True)
        for row in rows
        if row.ratio is not None
    ]
    _write(bars, 1.0, "Round trip of a call to a group of workers", "ordinary / compiled; dashed: no difference", path)


def _write(rows: list[tuple[str, float, str, bool]], bound: float | None, title: str, label: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rows = rows[::-1]
    figure = Figure(figsize=(9, 1.2 + 0.42 * len(rows)), layout="constrained")
    axes: Any = figure.add_subplot()
    colours = ["#3b7dd8" if ours else "#a9b4c4" for _, _, _, ours in rows]
    bars = axes.barh([name for name, *_ in rows], [value for _, value, _, _ in rows], color=colours, height=0.66)
    axes.bar_label(bars, [text for _, _, text, _ in rows], padding=4, fontsize=8)
    if bound:
        axes.axvline(bound, color="#c0392b", linewidth=1, linestyle="--")
    axes.set_xlim(0, max([bound or 0.0, *(value for _, value, _, _ in rows)]) * 1.25)
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format=path.suffix[1:], dpi=150)
    partial.replace(path)
