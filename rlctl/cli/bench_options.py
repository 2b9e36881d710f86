"""Options shared by commands of `rlctl bench`, and readers of lists of numbers."""

from math import isfinite
from typing import Annotated

import typer

from rlctl.cli.arguments import note_repeats
from rlctl.config.errors import Problem

TrainedModel = Annotated[
    str | None, typer.Option(help="A shape by name, or a Hugging Face folder. Default: tiny; on GPUs qwen3-1.7b.")
]
RunSettings = Annotated[
    list[str] | None, typer.Option("--set", callback=note_repeats, help="A key=value for every run. Repeatable.")
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
