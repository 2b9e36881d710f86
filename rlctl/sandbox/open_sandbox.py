"""The choice of a sandbox by its name."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rlctl.sandbox.base import Limits, Program, Sandbox, SandboxError
from rlctl.sandbox.bwrap import BwrapSandbox
from rlctl.sandbox.process_sandbox import ProcessSandbox

# Name -> constructor, the strongest first. The constructor takes further folders that programs may read.
KINDS: dict[str, Callable[[Sequence[Path]], Sandbox]] = {"bwrap": BwrapSandbox, "process": ProcessSandbox}
AUTO = "auto"


def open_sandbox(kind: str = AUTO, readable: Sequence[Path] = ()) -> Sandbox:
    """Return the sandbox of a kind after a first program in it. `auto` is the strongest kind that works here.

    Raises SandboxError with the reason for each kind that does not work.
    """
    reasons = []
    for name in KINDS if kind == AUTO else (kind,):
        try:
            sandbox = KINDS[name](readable)
            check_start(sandbox)
            return sandbox
        except SandboxError as error:
            reasons.append(f"{name}: {error}")
    raise SandboxError("; ".join(reasons))


def check_start(sandbox: Sandbox) -> None:
    """Run a first program. Raises SandboxError if it does not run to its end."""
    result = sandbox.run(Program(source="print(6 * 7)"), Limits())
    if not result.has_passed or result.stdout != b"42\n":
        reason = result.stderr.decode(errors="replace").strip() or result.ending
        raise SandboxError(f"its Python does not run: {reason[-300:]}")
