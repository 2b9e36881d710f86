"""The picture of `rlctl bench refit`: a bar a scheme, the plain link as the line that none can pass for long."""

from pathlib import Path

from rlctl.bench.results import Results


def write_plot(results: Results, path: Path) -> None:
    """PNG or SVG by the name's ending; appears whole or not at all. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rows = list(reversed(results.rows))
    figure = Figure(figsize=(9, 1.2 + 0.42 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    rates = [results.rate(row) for row in rows]
    colours = ["#3b7dd8" if row.mode else "#a9b4c4" for row in rows]
    bars = axes.barh([row.label for row in rows], rates, color=colours, height=0.66)
    labels = [f"{rate:.0f} GB/s, {results.share(row):.0%}" for rate, row in zip(rates, rows)]
    axes.bar_label(bars, labels, padding=4, fontsize=8)
    bound = results.payload / results.bound / 1e9
    axes.axvline(bound, color="#c0392b", linewidth=1, linestyle="--")
    axes.set_xlim(0, max([bound, *rates]) * 1.25)
    axes.set_xlabel("GB/s delivered to each engine; dashed: the plain link")
    ends = f"{results.trainers} trainer ranks, {results.engines} engines"
    title = f"{results.model}: {results.payload / 1e9:.1f} GB, {ends}"
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format=path.suffix[1:], dpi=150)
    partial.replace(path)
