"""Output of `rlctl runs rollouts`: a pager on a terminal, plain lines in a pipe, JSON of each group for scripts."""

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console

from rlctl.cli.output import BAD_INPUT, INTERRUPTED, say
from rlctl.config.errors import ConfigError, Problem
from rlctl.dashboard.console import SafeConsole
from rlctl.dashboard.rollout_query import NoSuchGroup, RolloutQuery, follow, select
from rlctl.dashboard.rollout_view import footer, plain, render_group
from rlctl.dashboard.state import read_state
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.exact_tokens import with_lists, without_tokens
from rlctl.telemetry.jsonl import Record


def make_query(
    step: str | None, validation: bool, worst: bool, best: bool, group: str | None, grep: str | None
) -> RolloutQuery:
    """Return the query that the options describe. Raises ConfigError with every wrong option."""
    problems = []
    steps = None
    if step is not None:
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", step)
        if match:
            steps = (int(match[1]), int(match[2] or match[1]))
        if steps is None or steps[0] > steps[1]:
            problems.append(Problem("--step", step, "must be a step or a range of steps, such as 12 or 10-20"))
    if worst and best:
        problems.append(Problem("--worst --best", "", "are two orders: leave one out"))
    pattern = None
    try:
        if grep:
            pattern = re.compile(grep)
    except re.error as error:
        problems.append(Problem("--grep", str(grep), f"no regular expression: {error}"))
    if problems:
        raise ConfigError(problems)
    order: Literal["worst", "best"] | None = None
    if worst or best:
        order = "worst" if worst else "best"
    return RolloutQuery(validation=validation, steps=steps, order=order, task=group, pattern=pattern)


class Printer:
    """Printer of the groups that match a query, from the run in `folder`."""

    def __init__(self, folder: Path, query: RolloutQuery, as_json: bool, tokens: bool = False) -> None:
        self._folder = folder
        self._path = RunDir(folder).rollouts
        self._query = query
        self._as_json = as_json
        self._with_tokens = tokens
        self._console = SafeConsole(highlight=False, emoji=False)

    def show(self, limit: int) -> None:
        """Print at most `limit` groups. On a terminal they are shown in a pager."""
        try:
            answer = select(self._path, self._query, limit)
        except NoSuchGroup as error:
            say(f"error: {self._folder.name}: {error}", err=True)
            raise typer.Exit(BAD_INPUT) from None
        uses_pager = self._console.is_terminal and not self._as_json
        # git's options for `less`: show colours, exit at once if the text fits on a screen, and leave the text there.
        os.environ.setdefault("LESS", "FRX")
        with self._console.pager(styles=True) if uses_pager else nullcontext():
            for group in answer.groups:
                self._print(group)
            if uses_pager:
                self._console.print(footer(answer.num_found, len(answer.groups), answer.recorded))
        if not answer.groups:
            say("no group has that text", err=True)

    def follow(self) -> None:
        """Print the newest groups, then each new group, until the run ends or Ctrl-C."""
        try:
            for group in follow(self._path, self._query, self._has_ended):
                self._print(group)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    def _has_ended(self) -> bool:
        return read_state(self._folder).status not in ("new", "running")

    def _print(self, group: Record) -> None:
        if not self._as_json:
            print_group(group, self._console, self._query.pattern, self._with_tokens)
            return
        try:
            record = with_lists(group) if self._with_tokens else without_tokens(group)
        except ValueError as error:
            say(f"warning: step {group.get('step')}, {group.get('task')}: {error}", err=True)
            record = without_tokens(group)
        print(json.dumps(record, ensure_ascii=False), flush=True)


def print_group(group: Record, out: Console, pattern: re.Pattern[str] | None = None, tokens: bool = False) -> None:
    """Print a group as readable text. pattern: its matches are marked. tokens: the exact tokens are added."""
    if out.is_terminal:
        out.print(render_group(group, out, pattern, tokens))
    else:
        print("\n".join(plain(group, tokens)), flush=True)
