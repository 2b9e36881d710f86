"""Sandboxes of this machine, opened once, for tests of each kind."""

from functools import cache

import pytest

from rlctl.config.sandbox_schema import SandboxName
from rlctl.sandbox.base import Limits, Program, Result, Sandbox, SandboxError
from rlctl.sandbox.open_sandbox import open_sandbox

# Kinds that run programs on this machine.
LOCAL_KINDS: tuple[SandboxName, ...] = ("bwrap", "process")
SMALL = Limits(wall_s=10.0, cpu_s=2.0, memory_mib=256, processes=16, output_bytes=10_000, files_mib=8)


@cache
def _open(kind: SandboxName) -> Sandbox | str:
    try:
        return open_sandbox(kind)
    except SandboxError as error:
        return str(error)


def local_sandbox(kind: SandboxName) -> Sandbox:
    """Return a sandbox of a kind; skip the test with the reason if this machine cannot have one."""
    sandbox = _open(kind)
    if isinstance(sandbox, str):
        pytest.skip(sandbox)
    return sandbox


def run_source(kind: SandboxName, source: str, limits: Limits = SMALL) -> Result:
    """Run a text in Python."""
    return local_sandbox(kind).run(Program(source=source), limits)
