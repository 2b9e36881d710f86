"""`rlctl`: the command line. Slow packages are imported only inside the commands that need them.

Exit codes: 0 done, 2 bad input, 1 failed, 130 interrupted.
"""

import atexit
import errno
import io
import os
import sys
from typing import Annotated

import typer

from rlctl.cli import (
    bench,
    chat,
    cluster,
    config,
    data,
    doctor,
    env,
    evaluate,
    export,
    loss,
    model,
    recipes,
    runs,
    train,
)
from rlctl.cli import examples as example_commands
from rlctl.cli.commands import Commands
from rlctl.cli.output import BAD_INPUT, FAILED, examples, report, say
from rlctl.config.errors import ConfigError, Problem, UserError

# Error numbers of a path that a user typed and that cannot be used.
_UNUSABLE = (
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ELOOP,
)
# Error numbers of a full disk or quota.
_FULL = (errno.ENOSPC, errno.EDQUOT)

_ORDER = (
    "train",
    "eval",
    "chat",
    "export",
    "runs",
    "config",
    "model",
    "data",
    "env",
    "loss",
    "recipes",
    "examples",
    "cluster",
    "bench",
    "doctor",
)


class _InOrder(Commands):
    """Root group that lists its commands in the order of `_ORDER`. Typer would list single commands before groups."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return sorted(self.commands, key=_ORDER.index)


app = typer.Typer(
    name="rlctl",
    cls=_InOrder,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "rlctl train grpo                        the tiny run, on two CPU cores",
        "rlctl train grpo my.yaml run.seed=1     your recipe, one value changed",
        "rlctl train grpo my.yaml --dry-run      what a run would do and need",
        "rlctl runs dash                         the newest run, live",
        "rlctl eval my-run                       its newest checkpoint on held-out tasks",
        "rlctl doctor                            is this machine ready?",
        "rlctl --install-completion              recipes, config keys and runs at the tab key",
    ),
)
for _part in (train, runs, config, model, data, env, loss, recipes, example_commands, cluster, bench):
    app.add_typer(_part.app, name=_part.__name__.rpartition(".")[2], cls=Commands)
app.command("eval", epilog=evaluate.EPILOG)(evaluate.evaluate)
app.command("export", epilog=export.EPILOG)(export.export)
app.command("chat", epilog=chat.EPILOG)(chat.chat)
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from rlctl.preflight.version import own_version

        typer.echo(f"rlctl {own_version()}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language models with GRPO and SFT on Ray, from one command."""


def main() -> None:
    """Run the command line as a process, and end it with the command's exit code."""
    codes: list[int] = []
    # Registered before any library is imported, so that it is called after the handlers of libraries.
    atexit.register(_skip_teardown, codes)
    _open_standard_streams()
    # In a locale without UTF-8, print `?` for a character that it lacks. An error would end a command or a run.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        answer()
    except SystemExit as end:
        if isinstance(end.code, int):
            codes.append(end.code)
        raise


def _open_standard_streams() -> None:
    """Open /dev/null for each of the three standard streams that the caller closed.

    Otherwise the next file that the process opens gets the stream's number, and child processes write into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # `open` takes the lowest free number, which is the closed stream's.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", errors="replace"))  # noqa: SIM115


def _skip_teardown(codes: list[int]) -> None:
    """End the process at once. A normal exit frees every object of torch, transformers and Ray: 1.2 s of CPU.

    codes: the exit code, or empty if the interpreter chooses it.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError) as error:
        # A normal exit reports output that cannot be written. EIO is a closed terminal, where nobody reads the report.
        if not isinstance(error, OSError) or error.errno != errno.EIO:
            return
    if codes:
        os._exit(codes[0])


def answer() -> None:
    """Run the command line. For bad input, print one line for each mistake instead of a traceback, and exit with 2."""
    try:
        os.getcwd()
    except OSError as error:
        report([Problem("", "", f"the working directory cannot be read: {error.strerror}; cd to one that exists")])
        sys.exit(BAD_INPUT)
    try:
        app()
    except UserError as error:
        report(error.problems if isinstance(error, ConfigError) else [Problem("", "", str(error))])
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        from rlctl.preflight.installation import missing_problem

        problem = missing_problem(error)
        if problem is None:
            raise
        report([problem])
        sys.exit(BAD_INPUT)
    except OSError as error:
        if error.errno in _FULL:
            say(f"error: {error.filename or 'the output'} cannot be written: {error.strerror}", err=True)
            # Redirect stdout, because the interpreter would fail to write the rest of its buffer at exit, report this
            # and change the exit code.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(FAILED)
        # A path that a user typed and that cannot be used is bad input. Any other OSError keeps its traceback.
        if error.errno not in _UNUSABLE or error.filename is None:
            raise
        report([Problem(str(error.filename), "", str(error.strerror))])
        sys.exit(BAD_INPUT)


if __name__ == "__main__":
    main()
