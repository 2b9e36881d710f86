"""Output of `rlctl runs rollouts`: a pager on a terminal, plain lines in a pipe, a JSON object a group for scripts."""

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path

import typer
from rich.console import Console

from rlctl.cli.output import BAD_INPUT, INTERRUPTED, say
from rlctl.config.errors import ConfigError, Problem
from rlctl.dashboard.console import SafeConsole
from rlctl.dashboard.rollout_query import NoSuchGroup, RolloutQuery, follow, select
from rlctl.dashboard.rollout_view import footer, plain, shown
from rlctl.dashboard.state import read_state
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.exact_tokens import with_lists, without_tokens
from rlctl.telemetry.jsonl import Record


def make_query(
    step: str | None, validation: bool, worst: bool, best: bool, group: str | None, grep: str | None
) -> RolloutQuery:
    """Return the query that the options mean. Raises ConfigError with every option that means nothing."""
    problems, steps, pattern = [], None, None
    if step is not None:
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", step)
        if found:
            steps = int(found[1]), int(found[2] or found[1])
        if not found or (steps and steps[0] > steps[1]):
            problems.append(Problem("--step", step, "must be a step or a range of steps, such as 12 or 10-20"))
    if worst and best:
        problems.append(Problem("--worst --best", "", "are two orders: leave one out"))
    try:
        pattern = re.compile(grep) if grep else None
    except re.error as error:
        problems.append(Problem("--grep", str(grep), f"no regular expression: {error}"))
    if problems:
        raise ConfigError(problems)
    return RolloutQuery(validation, steps, "worst" if worst else "best" if best else None, group, pattern)


class Printer:
    """Printer of the groups of the run in `folder` that a query asks for."""

    def __init__(self, folder: Path, query: RolloutQuery, as_json: bool, tokens: bool = False) -> None:
        self._folder, self._path, self._query = folder, RunDir(folder).rollouts, query
        self._json, self._tokens = as_json, tokens
        self._console = SafeConsole(highlight=False, emoji=False)

    def show(self, limit: int) -> None:
        """Print at most `limit` groups, on a terminal through a pager."""
        try:
            answer = select(self._path, self._query, limit)
        except NoSuchGroup as error:
            say(f"error: {self._folder.name}: {error}", err=True)
            raise typer.Exit(BAD_INPUT) from None
        terminal = self._console.is_terminal and not self._json
        # As git does: colours, no pager for text that fits on a screen; the text stays when the pager is left.
        os.environ.setdefault("LESS", "FRX")
        with self._console.pager(styles=True) if terminal else nullcontext():
            for group in answer.groups:
                self._print(group)
            if terminal:
                self._console.print(footer(answer.found, len(answer.groups), answer.recorded))
        if not answer.groups:
            say("no group has that text", err=True)

    def follow(self) -> None:
        """Print the newest groups and each that is added, until the run ends or Ctrl-C."""
        try:
            for group in follow(self._path, self._query, self._ended):
                self._print(group)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    def _ended(self) -> bool:
        return read_state(self._folder).status not in ("new", "running")

    def _print(self, group: Record) -> None:
        if not self._json:
            print_group(group, self._console, self._query.pattern, self._tokens)
            return
        try:
            record = with_lists(group) if self._tokens else without_tokens(group)
        except ValueError as error:
            say(f"warning: step {group.get('step')}, {group.get('task')}: {error}", err=True)
            record = without_tokens(group)
        print(json.dumps(record, ensure_ascii=False), flush=True)


def print_group(group: Record, out: Console, pattern: re.Pattern[str] | None = None, tokens: bool = False) -> None:
    """Print a group for a person. pattern: is marked in the texts. tokens: with the exact ones."""
    if out.is_terminal:
        out.print(shown(group, out, pattern, tokens))
    else:
        print("\n".join(plain(group, tokens)), flush=True)
