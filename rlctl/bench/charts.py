"""The chart that `rlctl bench algorithms --plot` writes. matplotlib is imported only to draw it."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.utils.files import write_whole

_BOUND = "#c0392b"
# Okabe and Ito's colours, which colour-blind readers can tell apart, with brown in place of yellow. A ninth curve has
# the first colour again, in the next line style.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6d31", "#000000")
_STYLES = ("-", "--", ":")


@dataclass(frozen=True)
class Curve:
    """Line through the means of several runs, in a band from the lowest to the highest run."""

    name: str
    x: dict[str, Sequence[float]]  # label of a panel -> x values in this panel
    mean: Sequence[float]
    least: Sequence[float]
    greatest: Sequence[float]


@dataclass(frozen=True)
class CurveChart:
    """Several panels in one row. Each draws the same curves over another x."""

    title: str
    label: str  # of the y axis
    curves: list[Curve]
    bound: float  # y of a dashed horizontal line

    def write(self, path: Path) -> None:
        """Write the chart atomically as PNG or SVG; the file name's ending decides. Needs matplotlib."""
        drawing = io.BytesIO()
        self._figure().savefig(drawing, format=path.suffix[1:], dpi=150)
        write_whole(path, drawing.getvalue())

    def _figure(self) -> Any:
        from matplotlib.figure import Figure

        labels = list(self.curves[0].x)
        # The legend below the panels has 5 names in a row.
        legend_rows = -(-len(self.curves) // 5)
        figure: Any = Figure(figsize=(5.5 * len(labels), 4.2 + 0.22 * legend_rows), layout="constrained")
        panels = figure.subplots(1, len(labels), sharey=True, squeeze=False)[0]
        for axes, label in zip(panels, labels):
            for index, curve in enumerate(self.curves):
                colour = _COLOURS[index % len(_COLOURS)]
                style = _STYLES[index // len(_COLOURS) % len(_STYLES)]
                axes.plot(curve.x[label], curve.mean, color=colour, linestyle=style, linewidth=1.8, label=curve.name)
                axes.fill_between(curve.x[label], curve.least, curve.greatest, color=colour, alpha=0.13, linewidth=0)
            axes.axhline(self.bound, color=_BOUND, linewidth=1, linestyle="--")
            axes.set_xlim(left=0)
            axes.set_xlabel(label)
            axes.grid(alpha=0.25)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel(self.label)
        figure.suptitle(self.title, fontsize=10, x=0.01, ha="left")
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(5, len(names)), frameon=False, fontsize=9)
        return figure
