"""The output of the command line: results on stdout, one line a problem on stderr, colour only on a terminal."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from rlctl.config.errors import ConfigError, Problem, UserError, locate_errors
from rlctl.utils.safe_text import neutral

if TYPE_CHECKING:
    from rich.console import Console

# Most problems of one config. Another tool's config is answered whole.
_MOST_SHOWN = 150
OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def examples(*lines: str) -> str:
    """Return the epilog of a command: its examples, as they are typed, one a line."""
    shown = "\n".join(f"  {line}" for line in lines).replace("[", r"\[")
    return f"[bold]Examples[/bold]\n{shown}"


def console(*, stderr: bool = False) -> "Console":
    """Return a console that breaks lines between words on a terminal, and not at all in a pipe.

    rich itself honours NO_COLOR.
    """
    from rlctl.dashboard.console import SafeConsole

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return SafeConsole(stderr=stderr, soft_wrap=not terminal, highlight=False, emoji=False)


def say(text: str, *, err: bool = False) -> None:
    """Print a line in which names and messages of others may be."""
    typer.echo(neutral(text), err=err)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show a moving line on a terminal's stderr while something slow is done; elsewhere nothing."""
    out = console(stderr=True)
    with out.status(what) if out.is_terminal else nullcontext():
        yield


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Show that data are read; turn their first mistake into a ConfigError."""
    from rlctl.data.files import DataError

    with locate_errors("data", DataError), busy(what):
        yield


def report(problems: Iterable[Problem]) -> None:
    """Print the problems, one a line, then their number."""
    from rich.text import Text

    listed, out = list(problems), console(stderr=True)
    for problem in listed[:_MOST_SHOWN]:
        out.print(Text.assemble(("error: ", "bold red"), str(problem)))
    if len(listed) > _MOST_SHOWN:
        out.print(Text(f"and {len(listed) - _MOST_SHOWN} more", style="dim"))
    count = "1 problem" if len(listed) == 1 else f"{len(listed)} problems"
    out.print(Text(f"{count}; nothing was started", style="dim"))


def note(lines: Iterable[str]) -> None:
    """Print remarks on stderr. They stop nothing."""
    from rich.text import Text

    for line in lines:
        console(stderr=True).print(Text.assemble(("note: ", "yellow"), line))


class ShownProgress:
    """Progress of a preparation on this terminal, see `PrepareProgress`."""

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Show a moving line."""
        return busy(what)

    def note(self, lines: Iterable[str]) -> None:
        """Print remarks."""
        note(lines)


def refuse(error: UserError) -> NoReturn:
    """Print the error's line and end the command with its exit code."""
    sys.stdout.flush()
    say(f"error: {error}", err=True)
    raise typer.Exit(error.exit_code) from None


@contextmanager
def explained() -> Iterator[None]:
    """End a command that a user's error or Ctrl-C ends with one line and the right exit code."""
    try:
        yield
    except ConfigError:
        raise
    except UserError as error:
        refuse(error)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def tell(kind: str, **what: Any) -> None:
    """Print warnings of engines that sample."""
    if kind in ("warning", "engine_restarted", "engine_gone"):
        say(f"note: {what.get('what') or f'{kind}: {what}'}", err=True)


@contextmanager
def explained_weights(interrupted: str) -> Iterator[None]:
    """End a command with one line and the right exit code for bad weights, data or engines.

    interrupted: the line for Ctrl-C.
    """
    try:
        yield
    except ConfigError:
        raise
    except UserError as error:
        refuse(error)
    except RuntimeError as error:
        say(f"error: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        say(interrupted, err=True)
        raise typer.Exit(INTERRUPTED) from None
