"""The output of the command line: results on stdout, a line for each problem on stderr, colour only on a terminal."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from rlctl.config.errors import ConfigError, Problem, UserError, locate_errors
from rlctl.utils.safe_text import neutral

if TYPE_CHECKING:
    from rich.console import Console

# The most problems that are printed. It is large enough for a config of another tool, where every key is a problem.
_MAX_PROBLEMS = 150
# Exit codes.
OK = 0
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


def examples(*lines: str) -> str:
    """Return the epilog of a command: its examples as a user types them, a line each."""
    escaped = "\n".join(f"  {line}" for line in lines).replace("[", r"\[")
    return f"[bold]Examples[/bold]\n{escaped}"


def console(*, stderr: bool = False) -> "Console":
    """Return a console that breaks lines between words on a terminal, and not at all in a pipe.

    rich itself honours NO_COLOR.
    """
    from rlctl.dashboard.console import SafeConsole

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return SafeConsole(stderr=stderr, soft_wrap=not terminal, highlight=False, emoji=False)


def say(text: str, *, err: bool = False) -> None:
    """Print a line. Terminal escape sequences are made visible, because the line may quote names and messages."""
    typer.echo(neutral(text), err=err)


@contextmanager
def busy(activity: str) -> Iterator[None]:
    """Show a moving line on a terminal's stderr during slow work; elsewhere show nothing."""
    out = console(stderr=True)
    with out.status(activity) if out.is_terminal else nullcontext():
        yield


@contextmanager
def reading(activity: str) -> Iterator[None]:
    """Show a moving line while data are read. Turn a DataError, a mistake in the data, into a ConfigError."""
    from rlctl.data.files import DataError

    with locate_errors("data", DataError), busy(activity):
        yield


def report(problems: Iterable[Problem]) -> None:
    """Print each problem on a line of stderr, then their number."""
    from rich.text import Text

    problems = list(problems)
    out = console(stderr=True)
    for problem in problems[:_MAX_PROBLEMS]:
        out.print(Text.assemble(("error: ", "bold red"), str(problem)))
    if len(problems) > _MAX_PROBLEMS:
        out.print(Text(f"and {len(problems) - _MAX_PROBLEMS} more", style="dim"))
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    out.print(Text(f"{count}; nothing was started", style="dim"))


def note(lines: Iterable[str]) -> None:
    """Print each remark as a line `note: ...` on stderr."""
    from rich.text import Text

    for line in lines:
        console(stderr=True).print(Text.assemble(("note: ", "yellow"), line))


class ShownProgress:
    """Shows the progress of `prepare` on this terminal. It implements the protocol `PrepareProgress`."""

    def busy(self, activity: str) -> AbstractContextManager[None]:
        """Show a moving line during the block."""
        return busy(activity)

    def note(self, lines: Iterable[str]) -> None:
        """Print remarks."""
        note(lines)


def refuse(error: UserError) -> NoReturn:
    """Print the error's line and end the command with its exit code."""
    sys.stdout.flush()
    say(f"error: {error}", err=True)
    raise typer.Exit(error.exit_code) from None


@contextmanager
def explain_errors() -> Iterator[None]:
    """Turn a UserError into one line and its exit code, and Ctrl-C into exit code 130. ConfigErrors pass through."""
    try:
        yield
    except ConfigError:
        raise
    except UserError as error:
        refuse(error)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def tell(kind: str, **fields: Any) -> None:
    """Print an engine's event as a note if it is a warning, a restart or a loss. Ignore other events."""
    if kind in ("warning", "engine_restarted", "engine_gone"):
        say(f"note: {fields.get('what') or f'{kind}: {fields}'}", err=True)


@contextmanager
def explain_engine_errors(interrupted: str) -> Iterator[None]:
    """Turn an error of weights, data or engines into one line and its exit code. ConfigErrors pass through.

    interrupted: the line that is printed after Ctrl-C.
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
