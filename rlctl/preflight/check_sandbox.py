"""Checks of a run's sandbox by the config. A probe at the start measures it, see rlctl/sandbox/probe.py."""

import shutil
from pathlib import Path

from rlctl.config.plugins import TOOLS
from rlctl.config.schema import GrpoConfig
from rlctl.preflight.backend import Violation, Violations
from rlctl.sandbox.base import SandboxError
from rlctl.sandbox.command import split_command

_URL_SCHEMES = ("http://", "https://")


def check_sandbox(config: GrpoConfig, away: bool) -> Violations:
    """Find keys of another kind of sandbox, and commands and folders that are not there. away: not on this machine."""
    section = config.sandbox
    for kind, text in (("command", section.command), ("url", section.url)):
        if section.name == kind and text is None:
            yield Violation(f"sandbox.{kind}", f"must be set for sandbox.name={kind}", ("sandbox.name",))
        if section.name != kind and text is not None:
            yield Violation(f"sandbox.{kind}", f"needs sandbox.name={kind}, not {section.name}", ("sandbox.name",))
    if section.stop_command is not None and section.command is None:
        yield Violation("sandbox.stop_command", "needs sandbox.command, which is null", ("sandbox.command",))
    if section.readable and section.name in ("command", "url"):
        message = f"is for bwrap and process: {section.name} chooses the folders that programs read"
        yield Violation("sandbox.readable", message, ("sandbox.name",))
    if section.name == "url" and any(choice.name in TOOLS for choice in config.environment.environments.values()):
        message = "keeps no state for the tools of environment: use bwrap, process or command"
        yield Violation("sandbox.name", message, ("environment.name",))
    if config.runs_programs and config.environment.is_enabled and section.wall_s >= config.environment.timeout_s:
        message = f"must be below environment.timeout_s={config.environment.timeout_s:g}, which ends the episode"
        yield Violation("sandbox.wall_s", f"{message}, not {section.wall_s:g}", ("environment.timeout_s",))
    if section.url is not None and not section.url.startswith(_URL_SCHEMES):
        yield Violation("sandbox.url", f"must begin with http:// or https://, not {section.url}")
    for key, command in (("command", section.command), ("stop_command", section.stop_command)):
        if command is not None:
            yield from _check_words(f"sandbox.{key}", command, away)
    if not away:
        for folder in section.readable:
            if not Path(folder).is_dir():
                yield Violation("sandbox.readable", f"there is no folder {folder}")


def _check_words(key: str, command: str, away: bool) -> Violations:
    """Find a command that is none, or whose program is not on this machine."""
    try:
        words = split_command(command)
    except SandboxError as error:
        yield Violation(key, str(error))
        return
    if not away and shutil.which(words[0]) is None:
        yield Violation(key, f"there is no program {words[0]} on this machine's path")
