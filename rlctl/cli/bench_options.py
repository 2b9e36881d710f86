"""Options shared by commands of `rlctl bench`, and readers of lists of numbers."""

from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.arguments import note_repeats
from rlctl.config.errors import Problem

if TYPE_CHECKING:
    from rlctl.bench.simulation import Costs

Plot = Annotated[Path | None, typer.Option(help="Write a chart to this PNG or SVG file. Needs matplotlib.")]
TrainedModel = Annotated[
    str | None, typer.Option(help="A shape by name, or a Hugging Face folder. Default: tiny; on GPUs qwen3-1.7b.")
]
RunSettings = Annotated[
    list[str] | None, typer.Option("--set", callback=note_repeats, help="A key=value for every run. Repeatable.")
]
Advise = Annotated[bool, typer.Option("--advise", help="Simulate every split, bound and lookahead, and advise one.")]
Rates = Annotated[
    str | None,
    typer.Option(
        help="Of --advise, not measured then: tokens/s/device of training, ms of an engine's step, ms more a sequence."
    ),
]


def read_lengths(given: str, problems: list[Problem]) -> tuple[float, float, int]:
    """Read mean, sigma and cap of log-normal lengths, in tokens; add a problem to `problems` if there is one."""
    try:
        mean, sigma, cap = (float(part) for part in given.split(","))
        if all(isfinite(each) and each > 0 for each in (mean, sigma, cap)) and cap == int(cap):
            return mean, sigma, int(cap)
    except ValueError:
        pass
    problems.append(Problem("--lengths", "", f"{given!r}: mean, sigma and cap above 0, like 600,1.0,4096"))
    return 1.0, 1.0, 1


def read_rates(given: str, problems: list[Problem]) -> "Costs | None":
    """Read the costs that `--rates` states; None, with a problem added to `problems`, if it states none."""
    from rlctl.bench.simulation import Costs
    from rlctl.generation.simulated_engine import DecodeCost

    try:
        training, base, each = (float(part) for part in given.split(","))
        if min(training, base) > 0 and each >= 0 and max(training, base, each) < inf:
            return Costs(training, DecodeCost(base / 1e3, each / 1e3))
    except ValueError:
        pass
    what = "tokens/s of training, ms of an engine's step, and ms more for each sequence, like 21900,2.6,0.018"
    problems.append(Problem("--rates", "", f"{given!r}: {what}"))
    return None
