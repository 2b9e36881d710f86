"""The choice of a sandbox: by its name, or the strongest that a probe finds to hold."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlctl.config.sandbox_schema import SandboxName, SandboxSection
from rlctl.sandbox.base import Limits, Program, Sandbox, SandboxError
from rlctl.sandbox.bwrap import BwrapSandbox
from rlctl.sandbox.command import CommandSandbox
from rlctl.sandbox.probe import ProbeReport, probe
from rlctl.sandbox.process_sandbox import ProcessSandbox
from rlctl.sandbox.url import UrlSandbox

# Name -> constructor of a sandbox on this machine, the strongest first. It takes further folders to be readable.
LOCAL_KINDS: dict[SandboxName, Callable[[Sequence[Path]], Sandbox]] = {"bwrap": BwrapSandbox, "process": ProcessSandbox}
# Variable with the run's section of the config, for the processes of rewards and environments.
_VARIABLE = "RLCTL_SANDBOX"


@dataclass(frozen=True)
class ChosenSandbox:
    """A sandbox with the guarantees of a config."""

    # Kind of the sandbox.
    name: SandboxName
    sandbox: Sandbox
    report: ProbeReport

    def __str__(self) -> str:
        return f"sandbox {self.sandbox.name}: {self.report.describe()}"


def choose_sandbox(section: SandboxSection) -> ChosenSandbox:
    """Return the first sandbox of a section whose probe finds all required guarantees.

    Raises SandboxError with the reason for each kind that does not do.
    """
    reasons = []
    for name in _candidates(section.name):
        try:
            sandbox = _construct(name, section)
            check_start(sandbox)
            report = probe(sandbox)
        except SandboxError as error:
            reasons.append(f"{name}: {error}")
            continue
        absent = [guarantee for guarantee in section.require if report.strengths[guarantee] == "absent"]
        if not absent:
            return ChosenSandbox(name, sandbox, report)
        sandbox.close()
        reasons += [f"{name}: {report.breaches.get(guarantee, f'{guarantee} is absent')}" for guarantee in absent]
    raise SandboxError("; ".join(reasons))


def open_sandbox(kind: SandboxName | None = None, readable: Sequence[Path] = ()) -> Sandbox:
    """Return a sandbox of this machine after a first program in it. None: the run's, and outside a run `auto`.

    `auto` is the strongest kind that works here. Raises SandboxError with the reason for each kind that does not work.
    """
    section = run_section()
    if kind is None and section is not None:
        return _open_first(section.name, lambda name: _construct(name, section))
    return _open_first(kind or "auto", lambda name: LOCAL_KINDS[name](readable))


def use_section(section: SandboxSection) -> None:
    """Make a section that of this run: for this process, and for its further children."""
    os.environ[_VARIABLE] = json.dumps(asdict(section))


def run_section() -> SandboxSection | None:
    """Return the section of the run that this process belongs to; None if it belongs to none."""
    text = os.environ.get(_VARIABLE)
    return SandboxSection(**json.loads(text)) if text else None


def section_limits(section: SandboxSection) -> Limits:
    """Return the limits in a section."""
    return Limits(
        wall_s=section.wall_s,
        cpu_s=section.cpu_s,
        memory_mib=section.memory_mib,
        processes=section.processes,
        output_bytes=section.output_kib << 10,
        files_mib=section.files_mib,
    )


def check_start(sandbox: Sandbox) -> None:
    """Run a first program. Raises SandboxError if it does not run to its end."""
    result = sandbox.run(Program(source="print(6 * 7)"), Limits())
    if not result.has_passed or result.stdout != b"42\n":
        reason = result.stderr.decode(errors="replace").strip() or result.ending
        raise SandboxError(f"its Python does not run: {reason[-300:]}")


def _open_first(kind: SandboxName, construct: Callable[[SandboxName], Sandbox]) -> Sandbox:
    """Return the first sandbox of a kind that runs a program."""
    reasons = []
    for name in _candidates(kind):
        try:
            sandbox = construct(name)
            check_start(sandbox)
            return sandbox
        except SandboxError as error:
            reasons.append(f"{name}: {error}")
    raise SandboxError("; ".join(reasons))


def _candidates(kind: SandboxName) -> Sequence[SandboxName]:
    return list(LOCAL_KINDS) if kind == "auto" else [kind]


def _construct(name: SandboxName, section: SandboxSection) -> Sandbox:
    if name == "command":
        if section.command is None:
            raise SandboxError("sandbox.command is null")
        return CommandSandbox(section.command, section.stop_command)
    if name == "url":
        if section.url is None:
            raise SandboxError("sandbox.url is null")
        return UrlSandbox(section.url)
    return LOCAL_KINDS[name]([Path(folder) for folder in section.readable])
