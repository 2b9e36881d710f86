"""`rlctl train --dry-run`: shows the plan, writes the resolved config, starts nothing."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import typer

from rlctl.cli.output import OK, busy, console, note, reading, say
from rlctl.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlctl.launch.resume import Resumed
    from rlctl.preflight.load import Composed
    from rlctl.preflight.plan import RunPlan
    from rlctl.preflight.settled import Settled


def show_plan(
    composed: "Composed[Settled]",
    plan: "RunPlan",
    resumed: "Resumed | None",
    where: str = "",
    demands: list[tuple[str, str]] | None = None,
) -> None:
    """End a dry run. where: the options that name a cluster; empty on this machine, where the data is too.

    demands: of a cluster that is not there, where nothing can be started.
    """
    from rlctl.cli.plan_view import data_rows, format_plan, format_rows
    from rlctl.data.files import files_of
    from rlctl.data.load import RowReader, end_tokens
    from rlctl.launch.data_preview import local_chat
    from rlctl.launch.first_row import check_room_of_rows
    from rlctl.launch.resume import plan_of_resume
    from rlctl.models.model_sizes import config_file

    note(composed.notes)
    console().print(format_plan(plan))
    if demands:
        console().print(format_rows("demands on the cluster", demands))
    refuse_plan(composed, plan.too_large)
    refuse_plan(composed, plan.unserved, "model.path")
    refuse_plan(composed, plan.unsaved, "run.dir")
    if demands is not None:
        raise typer.Exit(OK)
    if not where:
        data = composed.config.data
        chat = ends = None
        if config_file(composed.config.model.path):
            with reading("loading the tokenizer"):
                chat = local_chat(composed.config)
                ends = end_tokens(composed.config, chat)
        is_here = all(
            Path(each).exists() for path in (data.train.paths, data.validation.path) if path for each in files_of(path)
        )
        rows = None
        if is_here:
            with reading("reading the data"):
                rows = RowReader(composed.config).read()
                if chat:
                    check_room_of_rows(composed.settled, rows, chat)
        console().print(format_rows("data", data_rows(rows, ends)))
        note(ends.warnings if ends else [])
    if resumed:
        with busy("reading the newest checkpoint"):
            rows_of_resume = plan_of_resume(composed, resumed.run)
        console().print(format_rows("resume", rows_of_resume))
        say(f"\nrun it: {resumed.command(plan.kind, where)}")
        raise typer.Exit(OK)
    path = _write(composed)
    say(f"\nresolved config: {path}\nrun it: rlctl train {plan.kind} {quote(str(path))}{where}")
    raise typer.Exit(OK)


def refuse_plan(composed: "Composed[Settled]", why: str | None, key: str = "trainer.num_ranks") -> None:
    """Raise ConfigError if the machine cannot do the work that `key` asks for. why: the reason, None if it can."""
    if why:
        raise ConfigError([Problem(str(composed.origins.get(key, "")), key, why)])


def _write(composed: "Composed[Settled]") -> Path:
    """Write the resolved config next to the run directories, over the same recipe's, and return its path."""
    from rlctl.utils.files import foreign_link, write_whole

    run = composed.config.run
    path = Path(run.dir) / f"{run.name or composed.recipe.stem}.dry-run.yaml"
    try:
        if link := foreign_link(path.parent):
            raise OSError(f"{link} is another user's symbolic link")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, composed.to_yaml())
    except OSError as error:
        why = f"cannot write {path}: {error.strerror or error}"
        raise ConfigError([Problem(str(composed.origins.get("run.dir", "")), "run.dir", why)]) from error
    return path
