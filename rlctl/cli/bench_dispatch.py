"""Options of `rlctl bench dispatch`."""

from typing import Annotated

import typer

from rlctl.bench.frame import numbers
from rlctl.cli.bench import AsJson, Plot, run_bench
from rlctl.cli.output import examples
from rlctl.config.errors import Problem

EPILOG = examples(
    "rlctl bench dispatch",
    "rlctl bench dispatch --workers 1,8 --payloads 1KB,64MB --json",
    "rlctl bench dispatch --plot dispatch.svg",
)


def dispatch(
    workers: Annotated[str, typer.Option(help="Sizes of the groups.")] = "1,2,4,8",
    payloads: Annotated[str, typer.Option(help="What each worker gets with a call: bytes, KB or MB.")] = "1KB,1MB,8MB",
    calls: Annotated[int, typer.Option(min=20, help="Calls a row; a row of slow ones ends after 10 s.")] = 1000,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Time what one call to a group of workers costs the driver: ordinary calls against a Ray Compiled Graph."""
    from rlctl.bench.dispatch import UNITS, DispatchBench

    problems: list[Problem] = []
    sizes = numbers("--workers", workers, "1,2,4", problems)
    bytes_ = numbers("--payloads", payloads, "1KB,8MB", problems, UNITS)
    run_bench(DispatchBench(sizes, bytes_, calls), as_json, plot, problems)
