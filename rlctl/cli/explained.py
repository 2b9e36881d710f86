"""How a command that works with clusters ends when something keeps it from its work."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from rlctl.cli.output import BAD_INPUT, FAILED, INTERRUPTED, say


@contextmanager
def explained() -> Iterator[None]:
    """Ends a command in one line and the right exit code."""
    from rlctl.cluster.fleet.state import ClusterError, NoSuchCluster

    try:
        yield
    except ClusterError as error:
        sys.stdout.flush()
        say(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT if isinstance(error, NoSuchCluster) else FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
